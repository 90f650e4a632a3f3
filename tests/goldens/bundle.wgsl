fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
@group(0) @binding(0) var<storage, read_write> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
@group(0) @binding(2) var<storage, read_write> b2: array<f32>;
struct Words { w: array<vec4<u32>, 3> }
@group(1) @binding(0) var<uniform> words: Words;
fn ld0(i: u32) -> f32 { return b0[i]; }
fn st0(i: u32, v: f32) { b0[i] = v; }
fn ld1(i: u32) -> f32 { return b1[i]; }
fn st1(i: u32, v: f32) { b1[i] = v; }
fn ld2(i: u32) -> f32 { return b2[i]; }
fn st2(i: u32, v: f32) { b2[i] = v; }
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let own = group(wg, grid) * 256u + lane;
  if (own < words.w[1].w) {
    let x1 = own;
    let v0: u32 = (x1 - words.w[0].w);
    let v1: u32 = (words.w[0].x + v0);
    let v2: bool = (words.w[0].w <= x1);
    let v3: bool = (x1 < words.w[1].x);
    let v4: bool = (v2 && v3);
    let v5: bool = (words.w[1].x <= x1);
    let v6: bool = (x1 < words.w[1].y);
    let v7: bool = (v5 && v6);
    let v8: bool = (words.w[1].y <= x1);
    let v9: bool = (x1 < words.w[1].z);
    let v10: bool = (v8 && v9);
    let v11: u32 = (x1 - words.w[1].y);
    let v12: u32 = (words.w[0].z + v11);
    let g13: f32 = select((0.0f), ld2(select(0u, v12, v10)), v10);
    let v14: u32 = (x1 - words.w[1].x);
    let v15: u32 = (words.w[0].y + v14);
    let g16: f32 = select(g13, ld1(select(0u, v15, v7)), v7);
    let g17: f32 = select(g16, ld0(select(0u, v1, v4)), v4);
    let v18: f32 = (g17 * bitcast<f32>(words.w[2].x));
    let v19: f32 = (bitcast<f32>(words.w[2].y) * (1.0f));
    let v20: f32 = (v18 + v19);
    if (v4) { st0(v1, v20); }
    if (v7) { st1(v15, v20); }
    if (v10) { st2(v12, v20); }
  }
}
