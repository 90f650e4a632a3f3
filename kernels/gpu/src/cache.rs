//! Disk cache of compiled pipelines, for drivers that support it (Vulkan).

use std::fs;
use std::path::{Path, PathBuf};

use tandem_executor::threads::locks::{Mutex, Rank};

/// The driver's pipeline cache and the file that holds it. A damaged file is ignored and replaced.
#[derive(Debug)]
pub struct DiskCache {
    /// Cache to create pipelines with.
    pub pipelines: wgpu::PipelineCache,
    path: PathBuf,
    /// Number of bytes of cache data in the file.
    saved: Mutex<usize>,
}

const MAGIC: &[u8; 8] = b"TANDEMPC";

/// FNV-1a hash, which suffices to detect damage.
fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

/// The cache data in a file, or `None` if the file is damaged.
fn contents(file: &[u8]) -> Option<&[u8]> {
    let (magic, rest) = file.split_at_checked(8)?;
    let (sum, data) = rest.split_at_checked(8)?;
    (magic == MAGIC && sum == checksum(data).to_le_bytes()).then_some(data)
}

impl DiskCache {
    /// Opens the cache of an adapter and its driver. Returns `None` if the device does not support one, or if there
    /// is no directory for it.
    pub fn open(folder: &Path, device: &wgpu::Device, info: &wgpu::AdapterInfo) -> Option<DiskCache> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let key = wgpu::util::pipeline_cache_key(info)?;
        let driver = checksum(format!("{} {}", info.driver, info.driver_info).as_bytes());
        let path = folder.join("pipelines").join(format!("{key}-{driver:016x}"));
        let file = fs::read(&path).unwrap_or_default();
        let data = contents(&file);
        if data.is_none() && !file.is_empty() {
            tracing::warn!(path = %path.display(), "the cache of compiled kernels is damaged and made anew");
        }
        // SAFETY: the key of the file names the adapter and the driver, so the data come from a cache of the same
        // driver, and the checksum shows that they are complete.
        let pipelines = unsafe {
            device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
                label: Some("tandem"),
                data,
                fallback: true,
            })
        };
        Some(DiskCache { pipelines, path, saved: Mutex::new(Rank::GpuCache, data.map_or(0, <[u8]>::len)) })
    }

    /// Writes the cache to its file if it has grown. Failures are only logged, because nothing depends on the file.
    pub fn save(&self) {
        let Some(data) = self.pipelines.get_data() else { return };
        let mut saved = self.saved.lock();
        if data.len() == *saved {
            return;
        }
        let mut file = MAGIC.to_vec();
        file.extend_from_slice(&checksum(&data).to_le_bytes());
        file.extend_from_slice(&data);
        let part = self.path.with_extension(format!("{}", std::process::id()));
        let written = self
            .path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&part, file))
            .and_then(|()| fs::rename(&part, &self.path));
        match written {
            Ok(()) => *saved = data.len(),
            Err(error) => tracing::debug!(%error, "the cache of compiled kernels cannot be written"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_noticed() {
        let mut file = MAGIC.to_vec();
        file.extend_from_slice(&checksum(b"pipelines").to_le_bytes());
        file.extend_from_slice(b"pipelines");
        assert_eq!(contents(&file), Some(&b"pipelines"[..]));
        *file.last_mut().unwrap() ^= 1;
        assert_eq!(contents(&file), None);
        assert_eq!(contents(b"short"), None);
    }
}
