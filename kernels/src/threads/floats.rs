//! Whether a thread takes denormal numbers for zeros: `torch.set_flush_denormal` says so to one thread.

/// The bits that say so in a thread's control register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Floats(u64);

/// The thread's bits of before come back when this is dropped.
pub struct During(Option<Floats>);

impl Floats {
    /// Flush to zero, and denormals are zeros.
    #[cfg(target_arch = "x86_64")]
    const MASK: u64 = 0x8040;
    /// Flush to zero.
    #[cfg(target_arch = "aarch64")]
    const MASK: u64 = 1 << 24;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const MASK: u64 = 0;

    /// The calling thread's.
    pub fn now() -> Floats {
        Floats(read() & Floats::MASK)
    }

    /// Makes them the calling thread's for a while.
    pub fn during(self) -> During {
        let before = Floats::now();
        if before == self {
            return During(None);
        }
        self.set();
        During(Some(before))
    }

    fn set(self) {
        write(read() & !Floats::MASK | self.0);
    }
}

impl Drop for During {
    fn drop(&mut self) {
        self.0.into_iter().for_each(Floats::set);
    }
}

#[cfg(target_arch = "x86_64")]
fn read() -> u64 {
    let mut bits = 0u32;
    // SAFETY: stores the register in a live variable.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut bits, options(nostack, preserves_flags)) };
    u64::from(bits)
}

#[cfg(target_arch = "x86_64")]
fn write(bits: u64) {
    let bits = bits as u32;
    // SAFETY: only how denormal numbers are treated changes.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const bits, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> u64 {
    let bits;
    // SAFETY: reads a register that every thread may read.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) bits, options(nomem, nostack, preserves_flags)) };
    bits
}

#[cfg(target_arch = "aarch64")]
fn write(bits: u64) {
    // SAFETY: only how denormal numbers are treated changes.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) bits, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read() -> u64 {
    0
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn write(_: u64) {}
