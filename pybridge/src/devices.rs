//! The devices of this process: the executor that `TANDEM_DEVICE` asks for.
//!
//! The feature `gpu` adds the wgpu executor. A build without it computes on the CPU.

use std::sync::LazyLock;

use tandem_cpu::CpuDevice;
use tandem_executor::driver::Driver;
use tandem_executor::executor::Executor;
#[cfg(feature = "gpu")]
use tandem_gpu::{
    Devices, GpuDevice,
    adapter::{Choice, choose, choose_each, entries, list, may_have_gpu},
    device::{Gpu, Options},
};

use crate::environment::ENVIRONMENT;
use crate::host::SHIM;

/// As on CUDA, a rank sees as many devices as its machine has ranks. All of them are the one device of this rank.
static COUNT: LazyLock<usize> = LazyLock::new(|| ENVIRONMENT.rank.map_or_else(named, |rank| rank.of));

#[cfg(feature = "gpu")]
fn named() -> usize {
    entries(&ENVIRONMENT.device).len()
}

#[cfg(not(feature = "gpu"))]
fn named() -> usize {
    1
}

/// Returns the number of devices: the number of ranks on this machine, or the length of the list in `TANDEM_DEVICE`, or
/// 1.
pub fn count() -> usize {
    *COUNT
}

fn cpu() -> Box<dyn Executor> {
    Box::new(Driver::on(CpuDevice::new(&SHIM, ENVIRONMENT.native_kernels)))
}

/// Opens the executor that `TANDEM_DEVICE` asks for.
#[cfg(feature = "gpu")]
pub fn open() -> Result<Box<dyn Executor>, String> {
    let (device, software, rank) = (&ENVIRONMENT.device, ENVIRONMENT.allow_software, ENVIRONMENT.rank);
    let process = rank.map_or(0, |rank| rank.number);
    let of_rank = |list: Vec<&'static str>| list[process % list.len()];
    let device = if rank.is_some() { of_rank(entries(device)) } else { device.as_str() };
    let asks_drivers = match device {
        "cpu" => false,
        "" => may_have_gpu(),
        _ => true,
    };
    let adapters = if asks_drivers { list() } else { Vec::new() };
    let given = &ENVIRONMENT.gpu;
    let options =
        Options { without: given.without.clone(), checks: given.checks, cache: given.cache.clone() };
    let open = |number, index| {
        let gpu = Gpu::open(number, index, &options).map_err(|e| e.to_string())?;
        Ok::<_, String>(GpuDevice::new(gpu, &SHIM))
    };
    if rank.is_none() && count() > 1 {
        let numbers = choose_each(device, software, &adapters).map_err(|e| e.to_string())?;
        let all = numbers.into_iter().zip(0..).map(|(number, index)| open(number, index));
        return Ok(Box::new(Driver::on(Devices::new(all.collect::<Result<_, _>>()?))));
    }
    match choose(device, software, process, &adapters).map_err(|e| e.to_string())? {
        Choice::Cpu => Ok(cpu()),
        Choice::Adapter(number) => Ok(Box::new(Driver::on(open(number, 0)?))),
    }
}

/// Opens the executor that `TANDEM_DEVICE` asks for.
#[cfg(not(feature = "gpu"))]
pub fn open() -> Result<Box<dyn Executor>, String> {
    match ENVIRONMENT.device.as_str() {
        "" | "cpu" => Ok(cpu()),
        other => Err(format!("TANDEM_DEVICE={other}: this build of Tandem is for the CPU alone")),
    }
}

/// Returns descriptions of the GPU adapters.
pub fn adapters() -> Vec<impl serde::Serialize> {
    #[cfg(feature = "gpu")]
    return list();
    #[cfg(not(feature = "gpu"))]
    Vec::<()>::new()
}
