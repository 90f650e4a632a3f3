//! Treatment of denormal numbers, which `torch.set_flush_denormal` sets for a single thread.

/// Bits of a thread's control register that select the treatment of denormal numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Floats(u64);

/// A guard that restores the thread's previous bits when it is dropped.
pub struct During(Option<Floats>);

impl Floats {
    /// Flush-to-zero and denormals-are-zero bits of MXCSR.
    #[cfg(target_arch = "x86_64")]
    const MASK: u64 = 0x8040;
    /// Flush-to-zero bit of FPCR.
    #[cfg(target_arch = "aarch64")]
    const MASK: u64 = 1 << 24;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const MASK: u64 = 0;

    /// The bits of the calling thread.
    pub fn now() -> Floats {
        Floats(read() & Floats::MASK)
    }

    /// Sets these bits in the calling thread until the guard is dropped.
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
    // SAFETY: the instruction stores MXCSR to a live variable of its size.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut bits, options(nostack, preserves_flags)) };
    u64::from(bits)
}

#[cfg(target_arch = "x86_64")]
fn write(bits: u64) {
    let bits = bits as u32;
    // SAFETY: the instruction loads MXCSR from a live variable. The value differs from the register's in the bits
    // of `MASK` alone, so no exception is unmasked.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const bits, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> u64 {
    let bits;
    // SAFETY: the instruction reads a register that user code may read.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) bits, options(nomem, nostack, preserves_flags)) };
    bits
}

#[cfg(target_arch = "aarch64")]
fn write(bits: u64) {
    // SAFETY: the value differs from the register's in the bits of `MASK` alone.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) bits, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read() -> u64 {
    0
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn write(_: u64) {}
