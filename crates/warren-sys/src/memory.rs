//! Memory that a control group can refuse without ending anybody.
#![expect(
    unsafe_code,
    reason = "a mapping whose pages are asked for in a way that no wrapper knows"
)]

use std::io;
use std::ptr::null_mut;

/// The size of a huge page where pages have 4 KiB.
pub const HUGE_PAGE: usize = 2 << 20;

/// See madvise(2); not every C library names it.
const COLLAPSE: libc::c_int = 25;

/// Takes so many huge pages, one after the other, and gives them back.
///
/// A control group that has no room for one answers EBUSY, and nobody is killed for it: the kernel does that for want of a
/// few pages at once, not of 512. Any other error says nothing of the group: EINVAL is a kernel that has no huge
/// pages or does not know the call, ENOMEM a host that has none left. See MADV_COLLAPSE in madvise(2), Linux 6.1.
pub fn take_huge_pages(count: usize) -> io::Result<()> {
    // One more, as they begin where they must and the mapping where it likes.
    let length = count.saturating_add(1).saturating_mul(HUGE_PAGE);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: without an address and without MAP_FIXED it replaces no mapping that is there.
    let start = unsafe { libc::mmap(null_mut(), length, access, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let first = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
    let taken = (0..count).try_for_each(|number| {
        let page = start.wrapping_byte_add(first + number * HUGE_PAGE);
        // SAFETY: less than `HUGE_PAGE` comes before the first, so that each is inside of the mapping; it can be
        // written, and nobody else knows of it.
        unsafe { page.cast::<u8>().write_volatile(1) };
        // SAFETY: it is inside, as above, and to have it elsewhere in memory changes nothing of what is in it.
        crate::check(unsafe { libc::madvise(page, HUGE_PAGE, COLLAPSE) }).map(drop)
    });
    // SAFETY: the whole mapping from above, to which no pointer is left.
    unsafe { libc::munmap(start, length) };
    taken
}
