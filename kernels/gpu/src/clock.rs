//! Times of kernels by the device's clock.
//!
//! Each measured kernel has a compute pass of its own, and the device writes timestamps at the beginning and the end of
//! the pass. The timestamps of a submission are copied to a separate buffer, which is read when the times are
//! requested.

use crate::device::Gpu;

/// Maximum number of kernels of a submission that are measured. The times of further kernels count as 0.
const MAX_MEASURED: u32 = 2048;

/// Measurements of kernels.
#[derive(Debug)]
pub struct Clock {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    /// Nanoseconds of a tick.
    period: f64,
    /// The measurement that recorded kernels belong to; `None` if they are not measured.
    current: Option<u32>,
    /// Measurements of the kernels encoded since the last submission.
    encoded: Vec<u32>,
    /// Measurements of submissions, and buffers with their timestamps.
    submitted: Vec<(Vec<u32>, wgpu::Buffer)>,
}

impl Clock {
    /// A clock, if the device has timestamps.
    pub fn new(gpu: &Gpu) -> Option<Clock> {
        if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let set = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("timestamps"),
            ty: wgpu::QueryType::Timestamp,
            count: 2 * MAX_MEASURED,
        });
        let resolved = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("timestamps"),
            size: u64::from(MAX_MEASURED) * 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let period = f64::from(gpu.queue.get_timestamp_period());
        Some(Clock { set, resolved, period, current: None, encoded: Vec::new(), submitted: Vec::new() })
    }

    /// Sets the measurement that kernels recorded from now on belong to.
    pub fn attribute(&mut self, measurement: Option<u32>) {
        self.current = measurement;
    }

    /// The measurement that recorded kernels belong to.
    pub fn current(&self) -> Option<u32> {
        self.current
    }

    /// The timestamps of a kernel's pass; `None` if the submission has no timestamps left.
    pub fn of_pass(&mut self, measurement: u32) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let at = self.encoded.len() as u32;
        if at == MAX_MEASURED {
            return None;
        }
        self.encoded.push(measurement);
        Some(wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: Some(2 * at),
            end_of_pass_write_index: Some(2 * at + 1),
        })
    }

    /// Encodes the copy of a submission's timestamps, after all its kernels.
    pub fn end(&mut self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) {
        if self.encoded.is_empty() {
            return;
        }
        let encoded = std::mem::take(&mut self.encoded);
        let bytes = encoded.len() as u64 * 16;
        let buffer = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("timestamps"),
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        encoder.resolve_query_set(&self.set, 0..2 * encoded.len() as u32, &self.resolved, 0);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &buffer, 0, bytes);
        self.submitted.push((encoded, buffer));
    }

    /// Waits for all submissions. Returns the measurements of their kernels and the kernels' times in nanoseconds. If
    /// the device is lost, its times are missing.
    pub fn read(&mut self, gpu: &Gpu) -> Vec<(u32, u64)> {
        for (_, buffer) in &self.submitted {
            buffer.map_async(wgpu::MapMode::Read, .., |_| {});
        }
        // The loss of the device is reported elsewhere.
        let _ = gpu.device.poll(wgpu::PollType::Wait { submission_index: None, timeout: None });
        let mut times = Vec::new();
        for (measurements, buffer) in self.submitted.drain(..) {
            let Ok(view) = buffer.get_mapped_range(..) else { continue };
            let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&view);
            for (measurement, ticks) in measurements.into_iter().zip(ticks.as_chunks::<2>().0) {
                let ticks = ticks[1].saturating_sub(ticks[0]);
                times.push((measurement, (ticks as f64 * self.period) as u64));
            }
        }
        times
    }
}
