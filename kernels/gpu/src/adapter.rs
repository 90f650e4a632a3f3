//! Lists the adapters of the system, and chooses adapters by the value of `TANDEM_DEVICE`.

use std::sync::LazyLock;

use serde::Serialize;
use thiserror::Error;

static INSTANCE: LazyLock<wgpu::Instance> = LazyLock::new(|| {
    let mut description = wgpu::InstanceDescriptor::new_without_display_handle();
    description.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(description)
});

/// Description of an adapter, for listings and for [`choose`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// Index in the list of adapters.
    pub index: usize,
    /// Name that the driver reports.
    pub name: String,
    /// `vulkan`, `metal` or `dx12`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// Name and version of the driver.
    pub driver: String,
    /// Tandem's optional features that the adapter supports, of `int64`, `f64`, `f16`, `int16` and `immediates`.
    pub features: Vec<&'static str>,
    /// Maximum number of bytes of a buffer that can be bound to a kernel.
    pub max_binding: u64,
}

/// Reason why no device could be opened.
#[derive(Debug, Error)]
pub enum AdapterError {
    /// No adapter matches the request.
    #[error("TANDEM_DEVICE={asked}: there is no such adapter; `tandem devices` lists what there is{hint}")]
    None {
        /// Value of `TANDEM_DEVICE`.
        asked: String,
        /// Advice appended to the message.
        hint: &'static str,
    },
    /// An entry of a list does not name an adapter.
    #[error(
        "TANDEM_DEVICE={asked}: every entry of a list is `gpu`, an adapter's number or a part of its name, and \
         \"{entry}\" is not; `tandem devices` lists what there is"
    )]
    Entry {
        /// Value of `TANDEM_DEVICE`.
        asked: String,
        /// The invalid entry.
        entry: String,
    },
    /// The driver refused to open the adapter.
    #[error("the adapter {name} cannot be opened: {error}; TANDEM_DEVICE=cpu does without it")]
    Refused {
        /// Name of the adapter.
        name: String,
        /// Message of the driver.
        error: String,
    },
}

fn kind(info: &wgpu::AdapterInfo) -> &'static str {
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    }
}

/// Optional features that kernels use, with their names in `TANDEM_GPU_WITHOUT`.
pub(super) const FEATURES: [(&str, wgpu::Features); 5] = [
    ("int64", wgpu::Features::SHADER_INT64),
    ("f64", wgpu::Features::SHADER_F64),
    ("f16", wgpu::Features::SHADER_F16),
    ("int16", wgpu::Features::SHADER_I16),
    ("immediates", wgpu::Features::IMMEDIATES),
];

fn enumerate() -> Vec<wgpu::Adapter> {
    let all = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    pollster::block_on(INSTANCE.enumerate_adapters(all))
}

fn listing(index: usize, adapter: &wgpu::Adapter) -> Listing {
    let info = adapter.get_info();
    let features = adapter.features();
    Listing {
        index,
        kind: kind(&info),
        backend: format!("{:?}", info.backend).to_lowercase(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        name: info.name,
        features: FEATURES.iter().filter(|(_, f)| features.contains(*f)).map(|(n, _)| *n).collect(),
        max_binding: adapter.limits().max_storage_buffer_binding_size,
    }
}

/// All adapters, in the order of the drivers.
pub fn list() -> Vec<Listing> {
    enumerate().iter().enumerate().map(|(i, a)| listing(i, a)).collect()
}

/// Whether the system may have a GPU. On Linux this looks for device files in `/dev`, because loading the drivers
/// takes time and a software driver keeps about 60 MB of memory after it has been loaded.
pub fn may_have_gpu() -> bool {
    const SIGNS: [&str; 6] = ["dri", "dxg", "kgsl", "mali", "nvidia", "pvr"];
    if !cfg!(target_os = "linux") {
        return true;
    }
    let Ok(mut files) = std::fs::read_dir("/dev") else { return true };
    files.any(|file| {
        file.is_ok_and(|file| SIGNS.iter().any(|sign| file.file_name().to_string_lossy().starts_with(sign)))
    })
}

/// Device to run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The CPU.
    Cpu,
    /// The adapter with this index.
    Adapter(usize),
}

/// Chooses a device. `asked` is the value of `TANDEM_DEVICE`. If it is empty, the best GPU is chosen, or the CPU if
/// there is no GPU. A software adapter is chosen if `asked` is its name or index, or is `gpu` while `software` is true
/// and there is no GPU. Processes with different numbers get different adapters among the best GPUs.
pub fn choose(
    asked: &str,
    software: bool,
    process: usize,
    adapters: &[Listing],
) -> Result<Choice, AdapterError> {
    let kinds = ["discrete", "integrated", "virtual", "other"];
    let of_kind = |kind: &&str| adapters.iter().filter(|l| l.kind == *kind).collect::<Vec<_>>();
    let best = kinds.iter().map(of_kind).find(|alike| !alike.is_empty());
    let best = best.map(|alike| alike[process % alike.len()]);
    let none = |hint| AdapterError::None { asked: asked.to_owned(), hint };
    match asked {
        "cpu" => Ok(Choice::Cpu),
        "" => Ok(best.map_or(Choice::Cpu, |l| Choice::Adapter(l.index))),
        "gpu" => {
            let any = best.or_else(|| adapters.iter().find(|l| software && l.kind == "software"));
            let hint = if adapters.is_empty() {
                ""
            } else {
                "; a software adapter is taken where TANDEM_ALLOW_SOFTWARE=1 is set"
            };
            any.map(|l| Choice::Adapter(l.index)).ok_or_else(|| none(hint))
        }
        name => {
            let number = name.parse::<usize>().ok();
            let wanted = name.to_lowercase();
            let fits = |l: &&Listing| Some(l.index) == number || l.name.to_lowercase().contains(&wanted);
            adapters.iter().find(fits).map(|l| Choice::Adapter(l.index)).ok_or_else(|| none(""))
        }
    }
}

/// The entries of a comma-separated list of devices, starting with the entry for `tandem:0`. Commas within parentheses
/// are part of an adapter's name.
pub fn entries(asked: &str) -> Vec<&str> {
    let mut depth = 0;
    let splits = |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth <= 0
    };
    asked.split(splits).map(str::trim).collect()
}

/// Chooses an adapter for each entry of a list, with [`entries`] and [`choose`].
pub fn choose_each(asked: &str, software: bool, adapters: &[Listing]) -> Result<Vec<usize>, AdapterError> {
    let one = |entry: &str| match (entry, choose(entry, software, 0, adapters)?) {
        ("", _) | (_, Choice::Cpu) => Err(AdapterError::Entry { asked: asked.into(), entry: entry.into() }),
        (_, Choice::Adapter(number)) => Ok(number),
    };
    entries(asked).into_iter().map(one).collect()
}

/// The adapter with this index.
pub fn adapter(index: usize) -> Option<wgpu::Adapter> {
    enumerate().into_iter().nth(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapters(kinds: &[&'static str]) -> Vec<Listing> {
        let listing = |(index, kind): (usize, &&'static str)| Listing {
            index,
            name: format!("The {kind} one"),
            backend: "vulkan".into(),
            kind,
            driver: String::new(),
            features: Vec::new(),
            max_binding: 0,
        };
        kinds.iter().enumerate().map(listing).collect()
    }

    #[test]
    fn the_best_real_gpu_is_the_default() {
        let all = adapters(&["software", "integrated", "discrete"]);
        assert_eq!(choose("", false, 0, &all).ok(), Some(Choice::Adapter(2)));
        assert_eq!(choose("", true, 0, &adapters(&["software"])).ok(), Some(Choice::Cpu));
        assert_eq!(choose("cpu", false, 0, &all).ok(), Some(Choice::Cpu));
    }

    #[test]
    fn processes_share_the_best_gpus() {
        let all = adapters(&["discrete", "integrated", "discrete"]);
        let chosen = [0, 1, 2].map(|process| choose("", false, process, &all).ok());
        assert_eq!(chosen, [0, 2, 0].map(|number| Some(Choice::Adapter(number))));
    }

    #[test]
    fn a_list_names_adapters_alone() {
        let all = adapters(&["integrated", "discrete"]);
        assert_eq!(choose_each("1, integrated,gpu", false, &all).ok(), Some(vec![1, 0, 1]));
        for wrong in ["gpu,cpu", "0,", "0,radeon"] {
            assert!(choose_each(wrong, false, &all).is_err_and(|e| e.to_string().contains("TANDEM_DEVICE=")));
        }
        assert_eq!(entries("llvmpipe (LLVM 19, 256 bits)"), ["llvmpipe (LLVM 19, 256 bits)"]);
    }

    #[test]
    fn software_only_where_it_is_meant() {
        let all = adapters(&["software"]);
        assert!(
            choose("gpu", false, 0, &all).is_err_and(|e| e.to_string().contains("TANDEM_ALLOW_SOFTWARE=1"))
        );
        assert_eq!(choose("gpu", true, 0, &all).ok(), Some(Choice::Adapter(0)));
        assert_eq!(choose("software", false, 0, &all).ok(), Some(Choice::Adapter(0)));
        assert_eq!(choose("0", false, 0, &all).ok(), Some(Choice::Adapter(0)));
        assert!(choose("radeon", false, 0, &all).is_err());
    }
}
