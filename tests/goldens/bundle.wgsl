fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
@group(0) @binding(0) var<storage, read_write> b0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> b1: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> b2: array<vec4<f32>>;
struct Words { w: array<vec4<u32>, 4> }
@group(1) @binding(0) var<uniform> words: Words;
fn ld0(i: u32) -> f32 { return b0[i >> 2u][i & 3u]; }
fn lv_whole0(i: u32) -> vec4<f32> { let w = b0[i >> 2u]; return w; }
fn lv0(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole0(i); }
  return vec4<f32>(ld0(i), ld0(i + 1u), ld0(i + 2u), ld0(i + 3u));
}
fn st0(i: u32, v: f32) { b0[i >> 2u][i & 3u] = v; }
fn ld1(i: u32) -> f32 { return b1[i >> 2u][i & 3u]; }
fn lv_whole1(i: u32) -> vec4<f32> { let w = b1[i >> 2u]; return w; }
fn lv1(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole1(i); }
  return vec4<f32>(ld1(i), ld1(i + 1u), ld1(i + 2u), ld1(i + 3u));
}
fn st1(i: u32, v: f32) { b1[i >> 2u][i & 3u] = v; }
fn ld2(i: u32) -> f32 { return b2[i >> 2u][i & 3u]; }
fn lv_whole2(i: u32) -> vec4<f32> { let w = b2[i >> 2u]; return w; }
fn lv2(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole2(i); }
  return vec4<f32>(ld2(i), ld2(i + 1u), ld2(i + 2u), ld2(i + 3u));
}
fn st2(i: u32, v: f32) { b2[i >> 2u][i & 3u] = v; }
var<private> own_words: u32;
struct Each { v0: f32, }
fn each(x1: u32, l0: f32) -> Each {
    let v0: f32 = (l0 * bitcast<f32>(words.w[0].z));
    let v1: f32 = (bitcast<f32>(words.w[0].w) * (1.0f));
    let v2: f32 = (v0 + v1);
    return Each(v2);
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let g = group(wg, grid);
  let member = 0u + u32(g >= words.w[0].x) + u32(g >= words.w[0].y);
  own_words = 1u + member * 1u;
  let own = ((g - words.w[own_words + 0u].x) * 256u + lane) * 4u;
  if (own + 4u <= words.w[own_words + 0u].z) {
    let x1 = own;
    let v3: u32 = (words.w[own_words + 0u].y + x1);
    let a0 = v3;
    let s0 = v3;
    if (((a0 | s0) & 3u) == 0u) {
    var l0: vec4<f32>;
    switch member {
      case 0u: { l0 = lv_whole0(a0); }
      case 1u: { l0 = lv_whole1(a0); }
      default: { l0 = lv_whole2(a0); }
    }
    let r0 = each(x1 + 0u, l0[0]);
    let r1 = each(x1 + 1u, l0[1]);
    let r2 = each(x1 + 2u, l0[2]);
    let r3 = each(x1 + 3u, l0[3]);
    switch member {
      case 0u: { b0[s0 >> 2u] = vec4(r0.v0, r1.v0, r2.v0, r3.v0); }
      case 1u: { b1[s0 >> 2u] = vec4(r0.v0, r1.v0, r2.v0, r3.v0); }
      default: { b2[s0 >> 2u] = vec4(r0.v0, r1.v0, r2.v0, r3.v0); }
    }
    return;
    }
  }
  for (var k = own; k < min(own + 4u, words.w[own_words + 0u].z); k++) {
    let x1 = k;
    let v3: u32 = (words.w[own_words + 0u].y + x1);
    let a0 = v3;
    let s0 = v3;
    var l0: f32;
    switch member {
      case 0u: { l0 = ld0(a0); }
      case 1u: { l0 = ld1(a0); }
      default: { l0 = ld2(a0); }
    }
    let r = each(x1, l0);
    switch member {
      case 0u: { st0(s0, r.v0); }
      case 1u: { st1(s0, r.v0); }
      default: { st2(s0, r.v0); }
    }
  }
}
