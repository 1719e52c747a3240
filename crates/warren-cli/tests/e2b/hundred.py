"""A hundred sandboxes, made, used and killed, a few at a time."""
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox


def use(number):
    one = Sandbox.create(timeout=120)
    one.files.write("/home/user/f", str(number))
    assert one.commands.run("cat f; sleep 300 & true").stdout == str(number)
    if number % 10 == 0:
        one.pause()
    assert one.kill()


with ThreadPoolExecutor(4) as pool:
    list(pool.map(use, range(100)))
print("done")
