//! Commands for the device, which are recorded in order, then encoded and submitted in batches.
//!
//! **Why.** Recording must not wait for kernels that are still being compiled, and each submission has a fixed
//! cost. **Strategy.** Recorded commands refer to buffers and pipelines. They are encoded and submitted when a
//! batch is full, at the end of a run, or when the host needs a value. While the device is busy and more runs wait,
//! runs share a submission. Bind groups are cached by their buffers. The number of submissions in flight is limited;
//! beyond the limit, recording waits for the oldest one.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::clock::Clock;
use crate::device::Gpu;
use crate::kernel::Groups;
use crate::memory::{BufId, Memory};
use crate::pipelines::{Pipeline, Pipelines};
use tandem_executor::error::DeviceError;
use tandem_executor::threads::locks::{Mutex, Rank};

/// The part of a buffer that is bound to a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Buffer.
    pub buf: BufId,
    /// Offset in bytes.
    pub begin: u64,
    /// Size in bytes; `None` for the rest of the buffer.
    pub bytes: Option<NonZeroU64>,
}

impl Bound {
    /// Binds the whole buffer.
    pub fn whole(buf: BufId) -> Bound {
        Bound { buf, begin: 0, bytes: None }
    }
}

#[derive(Debug)]
enum Command {
    Dispatch {
        pipeline: Arc<Pipeline>,
        bufs: SmallVec<[Bound; 8]>,
        words: u32,
        groups: [u32; 3],
        /// Number of the measurement that the kernel belongs to.
        measurement: Option<u32>,
    },
    Copy {
        from: BufId,
        from_offset: u64,
        to: BufId,
        to_offset: u64,
        bytes: u64,
    },
    Clear {
        buf: BufId,
        offset: u64,
        bytes: u64,
    },
}

/// Maximum number of commands of a submission.
const BATCH: usize = 512;

/// Maximum number of submissions in flight. It limits the host's lead over the device; a submission is a run of some 32
/// ops.
const IN_FLIGHT: usize = 8;

/// Time for which a read polls the device before the thread sleeps: about the cost of sleeping and waking.
const SPINS: Duration = Duration::from_micros(100);

/// Maximum number of cached bind groups.
const MAX_BIND_GROUPS: usize = 1 << 14;

/// Size in bytes of the uniform buffer for the parameters of a batch.
const RING: u64 = 1 << 20;

/// Size in bytes of the uniform binding of a dispatch.
const UNIFORM_BINDING: u64 = crate::print::MAX_WORDS as u64 * 4;

/// Recorder of commands for one device's queue.
#[derive(Debug)]
pub struct Stream {
    /// Device that the commands run on.
    pub gpu: Arc<Gpu>,
    /// Pool of the device's buffers.
    pub memory: Memory,
    /// Compiled kernels.
    pub pipelines: Pipelines,
    commands: Vec<Command>,
    /// Parameters of the recorded dispatches.
    words: Vec<u32>,
    bind_groups: FxHashMap<SmallVec<[u32; 10]>, wgpu::BindGroup>,
    bind_generation: u64,
    /// Uniform buffer for the parameters of a batch.
    ring: wgpu::Buffer,
    ring_group: wgpu::BindGroup,
    /// Number of the next submission, starting at 1.
    submission: u64,
    in_flight: VecDeque<wgpu::SubmissionIndex>,
    staging: Option<wgpu::Buffer>,
    /// Buffer whose first word is read back with every download.
    pub watch: Option<BufId>,
    /// Value of the first word of `watch` at the last download.
    pub watched: Option<u32>,
    /// Error of the first kernel that did not compile. All later reads return this error, because the values that they
    /// read may depend on the kernel.
    failed: Option<DeviceError>,
    /// Number of dispatches recorded.
    pub dispatches: u64,
    /// Number of submissions.
    pub submissions: u64,
    /// Measurements of kernels; `None` if the device has no timestamps.
    clock: Option<Clock>,
}

impl Stream {
    /// An empty stream.
    pub fn new(gpu: Arc<Gpu>) -> Stream {
        let pipelines = Pipelines::new(gpu.clone());
        let ring = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("parameters"),
            size: RING + UNIFORM_BINDING,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let binding = wgpu::BufferBinding { buffer: &ring, offset: 0, size: UNIFORM_BINDING.try_into().ok() };
        let ring_group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("parameters"),
            layout: &pipelines.uniforms,
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(binding) }],
        });
        Stream {
            memory: Memory::new(gpu.clone()),
            clock: Clock::new(&gpu),
            pipelines,
            gpu,
            commands: Vec::new(),
            words: Vec::new(),
            bind_groups: FxHashMap::default(),
            bind_generation: 0,
            ring,
            ring_group,
            submission: 1,
            in_flight: VecDeque::new(),
            staging: None,
            watch: None,
            watched: None,
            failed: None,
            dispatches: 0,
            submissions: 0,
        }
    }

    /// Allocates a buffer with undefined contents.
    pub fn allocate(&mut self, bytes: u64) -> Result<BufId, DeviceError> {
        if let Some(id) = self.memory.take(bytes) {
            return Ok(id);
        }
        self.make_room()?;
        self.memory.take(bytes).ok_or_else(|| self.no_memory(bytes))
    }

    /// Allocates a buffer with the contents `data`, for use by commands recorded from now on.
    pub fn upload_new(&mut self, data: &[u8]) -> Result<BufId, DeviceError> {
        let bytes = data.len() as u64;
        let id = match self.memory.take_idle(bytes, self.submission) {
            Some(id) => id,
            None => {
                self.make_room()?;
                self.memory.take_idle(bytes, self.submission).ok_or_else(|| self.no_memory(bytes))?
            }
        };
        self.write(id, 0, data);
        Ok(id)
    }

    /// Writes bytes to a buffer after all recorded commands.
    pub fn upload(&mut self, id: BufId, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.flush()?;
        // Writes consist of whole words. If the range is not word-aligned, the words that it overlaps are read back
        // first.
        let (begin, end) = (offset / 4 * 4, (offset + data.len() as u64).next_multiple_of(4));
        if begin == offset && end == offset + data.len() as u64 {
            self.write(id, offset, data);
            return Ok(());
        }
        let mut words = vec![0; (end - begin) as usize];
        self.download(id, begin, &mut words)?;
        let at = (offset - begin) as usize;
        words[at..at + data.len()].copy_from_slice(data);
        self.write(id, begin, &words);
        Ok(())
    }

    fn write(&mut self, id: BufId, offset: u64, data: &[u8]) {
        let Some(buffer) = self.memory.buffer(id) else { return };
        let whole = data.len() / 4 * 4;
        if whole > 0 {
            self.gpu.queue.write_buffer(buffer, offset, &data[..whole]);
        }
        if whole < data.len() {
            let mut last = [0; 4];
            last[..data.len() - whole].copy_from_slice(&data[whole..]);
            self.gpu.queue.write_buffer(buffer, offset + whole as u64, &last);
        }
    }

    /// Reads bytes of a buffer after all recorded commands.
    pub fn download(&mut self, id: BufId, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        const STAGING: u64 = 32 << 20;
        let mut done = 0;
        while done < to.len() {
            let at = offset + done as u64;
            let begin = at / 4 * 4;
            let end = (offset + to.len() as u64).min(begin + STAGING);
            let bytes = (end - begin).next_multiple_of(4);
            self.read_back(id, begin, bytes, &mut |data| {
                let skip = (at - begin) as usize;
                let n = (end - at) as usize;
                to[done..done + n].copy_from_slice(&data[skip..skip + n]);
            })?;
            done += (end - at) as usize;
        }
        Ok(())
    }

    fn read_back(
        &mut self,
        id: BufId,
        offset: u64,
        bytes: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        let all = bytes + 4;
        let staging = match self.staging.take().filter(|s| s.size() >= all) {
            Some(staging) => staging,
            None => {
                let description = wgpu::BufferDescriptor {
                    label: Some("staging"),
                    size: all.next_power_of_two().max(1 << 16),
                    usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                };
                let create = || self.gpu.device.create_buffer(&description);
                let made = self.gpu.scoped(wgpu::ErrorFilter::OutOfMemory, create);
                made.map_err(|_| self.no_memory(all))?
            }
        };
        let mut encoder = self.encode();
        if let Some(buffer) = self.memory.buffer(id) {
            encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, bytes);
        }
        let watch = self.watch.and_then(|id| self.memory.buffer(id));
        if let Some(buffer) = watch {
            encoder.copy_buffer_to_buffer(buffer, 0, &staging, bytes, 4);
        }
        let watches = watch.is_some();
        self.check()?;
        let index = self.submit(encoder);
        let mapped = Arc::new(Mutex::new(Rank::GpuMapped, None));
        let tell = mapped.clone();
        staging.map_async(wgpu::MapMode::Read, 0..all, move |result| {
            *tell.lock() = Some(result.map_err(|e| e.to_string()));
        });
        let arrived = self.spin_until(|| mapped.lock().is_some());
        let wait = wgpu::PollType::Wait { submission_index: Some(index), timeout: None };
        let polled =
            if arrived { Ok(()) } else { self.gpu.device.poll(wait).map(drop).map_err(|e| e.to_string()) };
        let result = mapped.lock().take().unwrap_or_else(|| Err("the device does not answer".into()));
        polled.and(result).map_err(|error| self.lost(error))?;
        self.in_flight.clear();
        {
            let view = staging.get_mapped_range(0..all).map_err(|e| self.lost(e.to_string()))?;
            let (data, word) = view.split_at(bytes as usize);
            sink(data);
            self.watched = watches.then(|| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        }
        staging.unmap();
        self.staging = Some(staging);
        Ok(())
    }

    /// Polls the device until `reached` returns true, for at most [`SPINS`]. Returns whether `reached` returned true. A
    /// software adapter is not polled, because it needs the cores for its own work.
    fn spin_until(&self, reached: impl Fn() -> bool) -> bool {
        let begin = Instant::now();
        while self.gpu.is_hardware && begin.elapsed() < SPINS {
            if self.gpu.device.poll(wgpu::PollType::Poll).is_err() || reached() {
                break;
            }
            std::hint::spin_loop();
        }
        reached()
    }

    /// Records a kernel. `bufs` are its bindings in the kernel's order, `words` its parameters.
    pub fn dispatch(
        &mut self,
        pipeline: &Arc<Pipeline>,
        bufs: SmallVec<[Bound; 8]>,
        words: impl IntoIterator<Item = u32>,
        groups: Groups,
    ) -> Result<(), DeviceError> {
        let groups = match groups {
            Groups::Grid(x, y, z) => [x, y, z],
            Groups::Linear(n) => {
                let max = u64::from(self.gpu.max_groups);
                let y = n.div_ceil(max).max(1);
                [n.div_ceil(y) as u32, y as u32, 1]
            }
        };
        let first = self.words.len() as u32;
        self.words.extend(words);
        self.words.resize(first as usize + pipeline.parameter_bytes as usize / 4, 0);
        if groups.contains(&0) {
            self.words.truncate(first as usize);
            return Ok(());
        }
        for bound in &bufs {
            self.memory.touch(bound.buf, self.submission);
        }
        self.dispatches += 1;
        let measurement = self.clock.as_ref().and_then(Clock::current);
        let pipeline = pipeline.clone();
        self.commands.push(Command::Dispatch { pipeline, bufs, words: first, groups, measurement });
        self.submit_full()
    }

    /// Records a copy of `bytes`, rounded up to whole words.
    pub fn copy(&mut self, from: (BufId, u64), to: (BufId, u64), bytes: u64) -> Result<(), DeviceError> {
        self.memory.touch(from.0, self.submission);
        self.memory.touch(to.0, self.submission);
        self.commands.push(Command::Copy {
            from: from.0,
            from_offset: from.1,
            to: to.0,
            to_offset: to.1,
            bytes: bytes.next_multiple_of(4),
        });
        self.submit_full()
    }

    /// Records that `bytes`, rounded up to whole words, are set to 0.
    pub fn clear(&mut self, buf: BufId, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.memory.touch(buf, self.submission);
        self.commands.push(Command::Clear { buf, offset, bytes: bytes.next_multiple_of(4) });
        self.submit_full()
    }

    fn submit_full(&mut self) -> Result<(), DeviceError> {
        if self.commands.len() >= BATCH { self.flush() } else { Ok(()) }
    }

    /// Attributes the kernels recorded from now on to a measurement, or to none. Returns whether the device has
    /// timestamps.
    pub fn attribute(&mut self, measurement: Option<u32>) -> bool {
        self.clock.as_mut().map(|clock| clock.attribute(measurement)).is_some()
    }

    /// Waits for all submissions. Returns the measurements of their kernels, and the kernels' times in nanoseconds.
    pub fn measured(&mut self) -> Vec<(u32, u64)> {
        self.clock.as_mut().map_or_else(Vec::new, |clock| clock.read(&self.gpu))
    }

    /// Whether the device has work for a while: a submission that it computes, and another one that waits. Commands
    /// that are recorded meanwhile can wait to become one larger submission.
    pub fn is_busy(&mut self) -> bool {
        if self.in_flight.len() < 2 {
            return false;
        }
        // Polling fails for a lost device, which the next submission reports.
        if self.gpu.device.poll(wgpu::PollType::Poll).is_ok_and(|status| status.is_queue_empty()) {
            self.in_flight.clear();
        }
        !self.in_flight.is_empty()
    }

    /// Submits the recorded commands. Returns the error of a kernel that did not compile or of a lost device.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        if self.commands.is_empty() {
            return self.check();
        }
        let encoder = self.encode();
        let index = self.submit(encoder);
        self.in_flight.push_back(index);
        if self.in_flight.len() > IN_FLIGHT {
            let oldest = self.in_flight.pop_front();
            self.wait(oldest)?;
        }
        self.check()
    }

    /// Submits the recorded commands and waits until the device is idle.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.flush()?;
        self.in_flight.clear();
        self.wait(None)?;
        self.check()
    }

    fn wait(&mut self, submission_index: Option<wgpu::SubmissionIndex>) -> Result<(), DeviceError> {
        let wait = wgpu::PollType::Wait { submission_index, timeout: None };
        match self.gpu.device.poll(wait) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.lost(error.to_string())),
        }
    }

    fn check(&mut self) -> Result<(), DeviceError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        self.gpu.ended().map_or(Ok(()), |why| Err(self.lost(why)))
    }

    fn lost(&self, error: String) -> DeviceError {
        DeviceError::Lost { device: self.gpu.title(), why: self.gpu.ended().unwrap_or(error) }
    }

    fn no_memory(&self, asked: u64) -> DeviceError {
        let usage = self.memory.usage();
        let device = self.gpu.title();
        DeviceError::OutOfMemory { device, asked, live: usage.live, cached: usage.cached }
    }

    /// Destroys all free buffers, after waiting for the recorded commands.
    pub fn make_room(&mut self) -> Result<(), DeviceError> {
        self.memory.release_cached(0);
        self.staging = None;
        self.synchronize()?;
        self.memory.submitted();
        Ok(())
    }

    fn submit(&mut self, encoder: wgpu::CommandEncoder) -> wgpu::SubmissionIndex {
        self.submission += 1;
        self.submissions += 1;
        let index = self.gpu.queue.submit([encoder.finish()]);
        self.memory.submitted();
        index
    }

    /// Encodes the recorded commands. If a kernel did not compile, the other commands are still encoded.
    fn encode(&mut self) -> wgpu::CommandEncoder {
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        if self.bind_generation != self.memory.generation || self.bind_groups.len() > MAX_BIND_GROUPS {
            self.bind_groups.clear();
            self.bind_generation = self.memory.generation;
        }
        let commands = std::mem::take(&mut self.commands);
        let words = std::mem::take(&mut self.words);
        let mut uniforms: Vec<u8> = Vec::new();
        let mut rest = commands.as_slice();
        while let Some(command) = rest.first() {
            match command {
                Command::Copy { from, from_offset, to, to_offset, bytes } => {
                    if let (Some(from), Some(to)) = (self.memory.buffer(*from), self.memory.buffer(*to)) {
                        encoder.copy_buffer_to_buffer(from, *from_offset, to, *to_offset, *bytes);
                    }
                    rest = &rest[1..];
                }
                Command::Clear { buf, offset, bytes } => {
                    if let Some(buffer) = self.memory.buffer(*buf) {
                        encoder.clear_buffer(buffer, *offset, Some(*bytes));
                    }
                    rest = &rest[1..];
                }
                Command::Dispatch { measurement, .. } => {
                    let mut clock = self.clock.take();
                    let timestamps =
                        measurement.zip(clock.as_mut()).and_then(|(of, clock)| clock.of_pass(of));
                    let alike = |c: &&Command| matches!(c, Command::Dispatch { measurement: None, .. });
                    let n = rest.iter().take_while(alike).count().max(1);
                    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                        label: None,
                        timestamp_writes: timestamps,
                    });
                    for command in &rest[..n] {
                        let encoded = self.encode_dispatch(&mut pass, command, &words, &mut uniforms);
                        self.failed = self.failed.take().or(encoded.err());
                    }
                    drop(pass);
                    self.clock = clock;
                    rest = &rest[n..];
                }
            }
        }
        if let Some(clock) = &mut self.clock {
            clock.end(&self.gpu, &mut encoder);
        }
        if !uniforms.is_empty() {
            self.gpu.queue.write_buffer(&self.ring, 0, &uniforms);
        }
        self.commands = commands;
        self.commands.clear();
        self.words = words;
        self.words.clear();
        encoder
    }

    fn encode_dispatch(
        &mut self,
        pass: &mut wgpu::ComputePass<'_>,
        command: &Command,
        words: &[u32],
        uniforms: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let Command::Dispatch { pipeline, bufs, words: first, groups, .. } = command else { return Ok(()) };
        let compiled = pipeline.get().map_err(DeviceError::Kernel)?;
        let first = *first as usize;
        let parameters: &[u8] =
            bytemuck::cast_slice(&words[first..first + pipeline.parameter_bytes as usize / 4]);
        pass.set_pipeline(&compiled);
        if pipeline.immediates {
            pass.set_immediates(0, parameters);
        } else {
            let step = self.gpu.uniform_step as usize;
            let at = uniforms.len().next_multiple_of(step);
            uniforms.resize(at, 0);
            uniforms.extend_from_slice(parameters);
            pass.set_bind_group(1, &self.ring_group, &[at as u32]);
        }
        let mut key: SmallVec<[u32; 10]> = SmallVec::new();
        key.push(pipeline.layout);
        key.extend(bufs.iter().map(|b| b.buf.0));
        for (i, bound) in bufs.iter().enumerate() {
            if let Some(bytes) = bound.bytes {
                let words = [bound.begin, bytes.get()].map(|n| [n as u32, (n >> 32) as u32]);
                key.push(i as u32);
                key.extend(words.into_iter().flatten());
            }
        }
        if let Some(group) = self.bind_groups.get(&key) {
            pass.set_bind_group(0, group, &[]);
        } else {
            let entries: SmallVec<[wgpu::BindGroupEntry<'_>; 8]> = bufs
                .iter()
                .enumerate()
                .filter_map(|(i, bound)| {
                    let buffer = self.memory.buffer(bound.buf)?;
                    let binding = wgpu::BufferBinding { buffer, offset: bound.begin, size: bound.bytes };
                    let resource = wgpu::BindingResource::Buffer(binding);
                    Some(wgpu::BindGroupEntry { binding: i as u32, resource })
                })
                .collect();
            let group = self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: self.pipelines.layout(pipeline.layout),
                entries: &entries,
            });
            pass.set_bind_group(0, &group, &[]);
            self.bind_groups.insert(key, group);
        }
        pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
        Ok(())
    }
}
