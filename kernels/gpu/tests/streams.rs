//! Kernels on any available adapter, without PyTorch.

use std::sync::Arc;

use smallvec::smallvec;
use tandem_executor::error::DeviceError;
use tandem_executor::ir::{E, Mem, Ty};
use tandem_gpu::adapter::{Choice, choose, list};
use tandem_gpu::device::{Gpu, Options};
use tandem_gpu::kernel::{Groups, Kernel};
use tandem_gpu::store::{Ref, Word};
use tandem_gpu::stream::{Bound, Stream};

/// A stream on any adapter. Prints a message and returns `None` if there is none.
fn stream(without: &[&str]) -> Option<Stream> {
    let adapters = list();
    let Ok(Choice::Adapter(index)) = choose("gpu", true, 0, &adapters) else {
        eprintln!("skipped: there is no graphics adapter");
        return None;
    };
    let without = without.iter().map(|s| (*s).to_owned()).collect();
    Some(Stream::new(Arc::new(
        Gpu::open(index, 0, &Options { without, checks: true, ..Options::default() }).unwrap(),
    )))
}

/// Runs a kernel that computes `i * scale` for `n` elements, and returns the results.
fn multiples(stream: &mut Stream, n: i64, scale: f32) -> Vec<f32> {
    let mut k = Kernel::new("multiples");
    let out = k.window(Ref::NewStorage(0), Mem::F32, &[n], &[1], true);
    let factor = k.constant(scale);
    k.map(&[n], |k, _, i| vec![k.store_linear(&out, i, i.cast(Ty::F32) * factor)]);
    let words: Vec<u32> = k
        .words
        .iter()
        .map(|w| match w {
            Word::Fixed(value) => *value,
            _ => 0,
        })
        .collect();
    let pipeline = stream.pipelines.of(&k).unwrap();
    let buffer = stream.allocate(n as u64 * 4).unwrap();
    stream.dispatch(&pipeline, smallvec![Bound::whole(buffer)], words, k.groups).unwrap();
    let mut bytes = vec![0; n as usize * 4];
    stream.download(buffer, 0, &mut bytes).unwrap();
    stream.memory.release(buffer);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn grids_beyond_one_axis() {
    for without in [&[][..], &["immediates", "limits"]] {
        let Some(mut stream) = stream(without) else { return };
        // The largest size needs more than 65,535 workgroups of 256 threads.
        for n in [1, 255, 17_000_000] {
            let values = multiples(&mut stream, n, 0.5);
            assert!(values.iter().enumerate().all(|(i, v)| *v == (i as f32) * 0.5), "{n}");
        }
        assert_eq!(stream.pipelines.len(), 1);
    }
}

#[test]
fn a_kernel_that_does_not_compile_is_an_error_of_all_later_reads() {
    let Some(mut stream) = stream(&[]) else { return };
    let mut k = Kernel::new("broken");
    k.window(Ref::NewStorage(0), Mem::F32, &[4], &[1], true);
    k.raw("this is no WGSL".into(), Groups::Linear(1));
    let pipeline = stream.pipelines.of(&k).unwrap();
    let buffer = stream.allocate(16).unwrap();
    stream.dispatch(&pipeline, smallvec![Bound::whole(buffer)], [], k.groups).unwrap();
    for _ in 0..2 {
        let read = stream.download(buffer, 0, &mut [0; 16]);
        assert!(matches!(&read, Err(DeviceError::Kernel(text)) if text.contains("broken")), "{read:?}");
        assert!(stream.flush().is_err() && stream.synchronize().is_err());
    }
}

#[test]
fn memory_that_cannot_be_had_is_an_error_with_sizes() {
    let Some(mut stream) = stream(&[]) else { return };
    let held = stream.allocate(1 << 20).unwrap();
    let mut taken = Vec::new();
    let error = loop {
        match stream.allocate(1 << 46) {
            Ok(id) => taken.push(id),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("out of GPU memory"), "{error}");
    assert!(error.to_string().contains("1048576 bytes are in use"), "{error}");
    stream.memory.release(held);
    assert_eq!(multiples(&mut stream, 2, 1.0), [0.0, 1.0]);
}

#[test]
fn a_lost_device_is_an_error() {
    let Some(mut stream) = stream(&[]) else { return };
    assert_eq!(multiples(&mut stream, 2, 1.0), [0.0, 1.0]);
    stream.gpu.device.destroy();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, DeviceError::Lost { .. }), "{error}");
}

#[test]
fn released_buffers_are_used_again_and_the_rest_is_bounded() {
    let Some(mut stream) = stream(&[]) else { return };
    for _ in 0..100 {
        let ids: Vec<_> = (1..20).map(|n| stream.allocate(n * 100_000).unwrap()).collect();
        ids.into_iter().for_each(|id| stream.memory.release(id));
    }
    let usage = stream.memory.usage();
    assert_eq!(usage.live, 0);
    assert!(usage.peak <= usage.live_peak * 5 / 4, "{usage:?}");
}

#[test]
fn expressions_are_shared_and_loops_keep_what_does_not_change_outside() {
    let mut k = Kernel::new("sum");
    let x = k.window(Ref::Input(0), Mem::F32, &[8, 5], &[5, 1], false);
    let out = k.window(Ref::NewStorage(0), Mem::F32, &[8], &[1], true);
    k.map(&[8], |k, c, i| {
        let n = k.size(5);
        let row = c[0].clone();
        let [sum] = k.fold(n, [E::lit(Ty::F32, 0.0)], |k, j, [a]| {
            let v = k.load(&x, &[row.clone(), j.clone()]);
            [a + &v * &v]
        });
        vec![k.store_linear(&out, i, sum)]
    });
    let text = tandem_gpu::print::wgsl(&k, Default::default()).unwrap();
    insta::assert_snapshot!(text, @r"
    fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
    @group(0) @binding(0) var<storage, read> b0: array<f32>;
    @group(0) @binding(1) var<storage, read_write> b1: array<f32>;
    struct Words { w: array<vec4<u32>, 1> }
    @group(1) @binding(0) var<uniform> words: Words;
    fn ld0(i: u32) -> f32 { return b0[i]; }
    fn ld1(i: u32) -> f32 { return b1[i]; }
    fn st1(i: u32, v: f32) { b1[i] = v; }
    @compute @workgroup_size(256)
    fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
      let own = group(wg, grid) * 256u + lane;
      if (own < words.w[0].z) {
        let x1 = own;
        let v0: u32 = (x1 * words.w[0].y);
        let v1: u32 = (words.w[0].x + v0);
        var x3: f32 = (0.0f);
        for (var x2 = 0u; x2 < words.w[0].w; x2++) {
        let v2: u32 = (v1 + x2);
        let v3: f32 = ld0(v2);
        let v4: f32 = (v3 * v3);
        let v5: f32 = (x3 + v4);
        x3 = v5;
        }
        st1(x1, x3);
      }
    }
    ");
}
