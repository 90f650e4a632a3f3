//! The host's memory on each system: how much there is, and addresses that nothing can access.

use crate::ffi::TtHostMemory;

#[unsafe(no_mangle)]
extern "C" fn tt_host_memory() -> TtHostMemory {
    host_memory()
}

/// Reserves a range of addresses without access rights and without memory, forever. Returns `None` if the system
/// refuses.
#[cfg(unix)]
pub fn reserve(bytes: usize) -> Option<u64> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping without access rights affects no other memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, kind, -1, 0) };
    (start != libc::MAP_FAILED).then_some(start as u64)
}

#[cfg(windows)]
pub fn reserve(bytes: usize) -> Option<u64> {
    use windows_sys::Win32::System::Memory::{MEM_RESERVE, PAGE_NOACCESS, VirtualAlloc};
    // SAFETY: a new range without access rights affects no other memory.
    let start = unsafe { VirtualAlloc(std::ptr::null(), bytes, MEM_RESERVE, PAGE_NOACCESS) };
    (!start.is_null()).then_some(start as u64)
}

/// Returns the free and the total memory.
#[cfg(unix)]
pub fn host_memory() -> TtHostMemory {
    // SAFETY: the function only reads a setting of the system.
    let setting = |name| unsafe { libc::sysconf(name) }.max(0) as u64;
    let page = setting(libc::_SC_PAGESIZE);
    TtHostMemory { free: free_pages() * page, total: setting(libc::_SC_PHYS_PAGES) * page }
}

#[cfg(windows)]
pub fn host_memory() -> TtHostMemory {
    use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
    let length = size_of::<MEMORYSTATUSEX>() as u32;
    let mut status = MEMORYSTATUSEX { dwLength: length, ..Default::default() };
    // SAFETY: the record has the length that it states. If the call fails, it stays zero.
    unsafe { GlobalMemoryStatusEx(&raw mut status) };
    TtHostMemory { free: status.ullAvailPhys, total: status.ullTotalPhys }
}

#[cfg(all(unix, not(target_vendor = "apple")))]
fn free_pages() -> u64 {
    // SAFETY: the function only reads a setting of the system.
    unsafe { libc::sysconf(libc::_SC_AVPHYS_PAGES) }.max(0) as u64
}

#[cfg(target_vendor = "apple")]
#[allow(deprecated)] // libc has only this binding of `mach_host_self`
fn free_pages() -> u64 {
    // SAFETY: numbers, for which zero is valid.
    let mut pages: libc::vm_statistics64 = unsafe { std::mem::zeroed() };
    let mut words = libc::HOST_VM_INFO64_COUNT;
    // SAFETY: the record has as many words as stated. If the call fails, it stays zero.
    unsafe {
        let (host, kind) = (libc::mach_host_self(), libc::HOST_VM_INFO64);
        libc::host_statistics64(host, kind, (&raw mut pages).cast(), &raw mut words);
    }
    u64::from(pages.free_count) + u64::from(pages.inactive_count)
}
