"""What a client without rights is told."""
import os

from e2b import Sandbox
from e2b.exceptions import AuthenticationException, SandboxException

mine = Sandbox.create(timeout=60)
for key in ("e2b_" + "0" * 40, "e2b_" + "f" * 40):
    for call in (
        lambda: Sandbox.create(api_key=key),
        lambda: Sandbox.get_info(mine.sandbox_id, api_key=key),
        lambda: Sandbox.kill(mine.sandbox_id, api_key=key),
        lambda: Sandbox.list(api_key=key).next_items(),
    ):
        try:
            call()
        except AuthenticationException:
            continue
        raise AssertionError("it was let in")
assert mine.is_running()
for bad in ({"timeout": 10**12}, {"network": {"deny_out": ["not an address"]}}, {"network": {"allow_out": ["10.0.0.1"]}}):
    try:
        Sandbox.create(**bad)
    except SandboxException as error:
        assert "400" in str(error), error
    else:
        raise AssertionError(f"it was taken: {bad}")
assert mine.kill()
print("done")
