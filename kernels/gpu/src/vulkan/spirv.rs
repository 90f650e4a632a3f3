//! SPIR-V of kernels: the output of `naga` with execution modes for floats, which WGSL cannot express.

use half::{bf16, f16};
use wgpu::naga;
use wgpu::naga::back::spv;
use wgpu::naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};

use crate::vulkan::Vulkan;

/// Numbers of the SPIR-V specification.
mod op {
    pub const EXTENSION: u32 = 10;
    pub const ENTRY_POINT: u32 = 15;
    pub const EXECUTION_MODE: u32 = 16;
    pub const CAPABILITY: u32 = 17;
    pub const TYPE_FLOAT: u32 = 22;
    pub const CONSTANT: u32 = 43;
}
const DENORM_PRESERVE: Mode = Mode { capability: 4464, mode: 4459 };
const SIGNED_ZERO_INF_NAN_PRESERVE: Mode = Mode { capability: 4466, mode: 4461 };
/// Capabilities of bfloat16 and of its cooperative matrices.
const BFLOAT16: [u32; 2] = [5116, 5118];
const BFLOAT16_EXTENSION: &str = "SPV_KHR_bfloat16";
/// Words before the first instruction.
const HEADER: usize = 5;

/// An execution mode for floats of a width, and its capability.
struct Mode {
    capability: u32,
    mode: u32,
}

/// Translates a kernel to SPIR-V. With `bfloat16`, the kernel's f16 stands for bfloat16.
pub fn spirv(source: &str, vulkan: Vulkan, checks: bool, bfloat16: bool) -> Result<Vec<u32>, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let (flags, capabilities) = (naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all());
    let info = naga::valid::Validator::new(flags, capabilities).validate(&module);
    let info = info.map_err(|e| e.emit_to_string(source))?;
    let policy = if checks { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = spv::Options {
        lang_version: vulkan.version,
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: policy,
            binding_array: policy,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: checks,
        emit_int_div_checks: checks,
        ..Default::default()
    };
    let words = spv::write_vec(&module, &info, &options, None).map_err(|e| e.to_string())?;
    Ok(with_modes(&words, vulkan, bfloat16))
}

/// The instructions of a module: their numbers and words.
fn instructions(words: &[u32]) -> impl Iterator<Item = (u32, &[u32])> {
    let mut rest = &words[HEADER..];
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let (this, others) = rest.split_at(((first >> 16) as usize).clamp(1, rest.len()));
        rest = others;
        Some((first & 0xffff, this))
    })
}

fn push(to: &mut Vec<u32>, op: u32, operands: &[u32]) {
    to.push(((operands.len() as u32 + 1) << 16) | op);
    to.extend_from_slice(operands);
}

/// Words of a string, which ends with a zero byte.
fn string(text: &str) -> Vec<u32> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(bytes.len() / 4 * 4 + 4, 0);
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

/// Adds the modes that the device has for the module's floats, and replaces f16 by bfloat16.
fn with_modes(words: &[u32], vulkan: Vulkan, bfloat16: bool) -> Vec<u32> {
    let mut widths: Vec<u32> = Vec::new();
    let mut halves = None;
    for (op, this) in instructions(words) {
        if op == op::TYPE_FLOAT {
            if this[2] == 16 {
                halves = Some(this[1]);
            }
            if !(bfloat16 && this[2] == 16) {
                widths.push(this[2]);
            }
        }
    }
    let wanted: Vec<(Mode, u32)> = widths
        .iter()
        .flat_map(|bits| {
            let specials = vulkan.specials.contains(*bits).then_some((SIGNED_ZERO_INF_NAN_PRESERVE, *bits));
            let denormals = vulkan.denormals.contains(*bits).then_some((DENORM_PRESERVE, *bits));
            specials.into_iter().chain(denormals)
        })
        .collect();
    let mut out = words[..HEADER].to_vec();
    let mut capabilities: Vec<u32> = wanted.iter().map(|(mode, _)| mode.capability).collect();
    if bfloat16 {
        capabilities.extend(BFLOAT16);
    }
    capabilities.sort_unstable();
    capabilities.dedup();
    capabilities.iter().for_each(|capability| push(&mut out, op::CAPABILITY, &[*capability]));
    let (mut extended, mut moded) = (false, false);
    let mut entry = 0;
    for (op, this) in instructions(words) {
        if bfloat16 && !extended && op != op::CAPABILITY {
            push(&mut out, op::EXTENSION, &string(BFLOAT16_EXTENSION));
            extended = true;
        }
        if op == op::EXECUTION_MODE && !moded {
            wanted.iter().for_each(|(mode, bits)| {
                push(&mut out, op::EXECUTION_MODE, &[entry, mode.mode, *bits]);
            });
            moded = true;
        }
        match op {
            op::ENTRY_POINT => entry = this[2],
            op::TYPE_FLOAT if bfloat16 && this[2] == 16 => {
                // The operand 0 is the encoding of bfloat16.
                push(&mut out, op, &[this[1], 16, 0]);
                continue;
            }
            op::CONSTANT if bfloat16 && Some(this[1]) == halves => {
                let value = bf16::from_f32(f16::from_bits(this[3] as u16).to_f32());
                push(&mut out, op, &[this[1], this[2], u32::from(value.to_bits())]);
                continue;
            }
            _ => {}
        }
        out.extend_from_slice(this);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vulkan::open::Widths;

    const KERNEL: &str = "enable f16;
@group(0) @binding(0) var<storage, read_write> x: array<vec4<f16>>;
@compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32) {
  x[i] = vec4<f16>(vec4<f32>(x[i]) * 2.0) + vec4<f16>(0.5h);
}";

    fn count(words: &[u32], op: u32, operands: &[u32]) -> usize {
        instructions(words).filter(|(o, w)| *o == op && w[1..].starts_with(operands)).count()
    }

    #[test]
    fn modes_and_bfloat16_are_added() {
        let all = Widths { b16: true, b32: true, b64: true };
        let vulkan =
            Vulkan { version: (1, 6), specials: all, denormals: Widths::default(), bfloat16: Some(16) };
        for bfloat16 in [false, true] {
            let words = spirv(KERNEL, vulkan, false, bfloat16).unwrap_or_default();
            assert_eq!(words.first(), Some(&0x0723_0203));
            let modes = instructions(&words)
                .filter(|(o, w)| *o == op::EXECUTION_MODE && w[2] == SIGNED_ZERO_INF_NAN_PRESERVE.mode);
            assert_eq!(modes.count(), if bfloat16 { 1 } else { 2 });
            assert_eq!(count(&words, op::CAPABILITY, &[BFLOAT16[0]]), usize::from(bfloat16));
            assert_eq!(count(&words, op::EXTENSION, &string(BFLOAT16_EXTENSION)), usize::from(bfloat16));
            let encoded = instructions(&words).filter(|(o, w)| *o == op::TYPE_FLOAT && w.len() == 4);
            assert_eq!(encoded.count(), usize::from(bfloat16));
            // 0.5 in the encoding of the type.
            let half = if bfloat16 { 0x3f00 } else { 0x3800 };
            let constants = instructions(&words).filter(|(o, w)| *o == op::CONSTANT && w[3] == half);
            assert_eq!(constants.count(), 1);
            // The word counts of all instructions match. Otherwise the module was not walked correctly.
            assert!(instructions(&words).all(|(_, w)| w.len() == (w[0] >> 16) as usize));
        }
    }
}
