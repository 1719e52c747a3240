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
///
/// The small page that a huge one is made of is there for each before the first is made: where huge ones have left no room
/// for it somebody would be killed.
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
    // SAFETY: the whole mapping from above; how it is kept in memory changes nothing of what is in it.
    let advise = |how| crate::check(unsafe { libc::madvise(start, length, how) }).map(drop);
    let first = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
    let pages = (0..count).map(|number| start.wrapping_byte_add(first + number * HUGE_PAGE));
    let taken = advise(libc::MADV_NOHUGEPAGE).and_then(|()| {
        for page in pages.clone() {
            // SAFETY: less than `HUGE_PAGE` comes before the first, so that each is inside of the mapping; it can be
            // written, and nobody else knows of it.
            unsafe { page.cast::<u8>().write_volatile(1) };
        }
        advise(libc::MADV_HUGEPAGE)?;
        pages.into_iter().try_for_each(|page| {
            // SAFETY: it is inside, as above, and to have it elsewhere in memory changes nothing of what is in it.
            crate::check(unsafe { libc::madvise(page, HUGE_PAGE, COLLAPSE) }).map(drop)
        })
    });
    // SAFETY: the whole mapping from above, to which no pointer is left.
    unsafe { libc::munmap(start, length) };
    taken
}

/// Takes so many huge pages, which are more than the control group has; `None` if the kernel says nothing of the group.
pub fn exceed(count: usize) -> Option<io::Result<()>> {
    let taken = take_huge_pages(count);
    let error = taken.as_ref().err().and_then(io::Error::raw_os_error);
    (taken.is_ok() || error == Some(libc::EBUSY)).then_some(taken)
}
