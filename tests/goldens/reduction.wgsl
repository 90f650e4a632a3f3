fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
@group(0) @binding(0) var<storage, read> b0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
struct Words { w: array<vec4<u32>, 1> }
@group(1) @binding(0) var<uniform> words: Words;
fn ld0(i: u32) -> f32 { return b0[i >> 2u][i & 3u]; }
fn lv_whole0(i: u32) -> vec4<f32> { let w = b0[i >> 2u]; return w; }
fn lv0(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole0(i); }
  return vec4<f32>(ld0(i), ld0(i + 1u), ld0(i + 2u), ld0(i + 3u));
}
fn ld1(i: u32) -> f32 { return b1[i]; }
fn st1(i: u32, v: f32) { b1[i] = v; }
var<workgroup> sh0: array<f32, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let worker = lane % 256u;
  let asked = group(wg, grid) * 1u + lane / 256u;
  let row_ok = asked < words.w[0].z;
  let x1 = min(asked, words.w[0].z - 1u);
    let first0 = (worker + 0u) * 4u;
    let has0 = first0 < words.w[0].w;
    let v0: u32 = (x1 * words.w[0].y);
    let v1: u32 = (words.w[0].x + v0);
    var a0_0: u32; { let x2 = select(0u, first0, has0);
    let v2: u32 = (v1 + x2);
    a0_0 = v2;
}
    var h0_0: vec4<f32>;
    let first1 = (worker + 256u) * 4u;
    let has1 = first1 < words.w[0].w;
    var a0_1: u32; { let x2 = select(0u, first1, has1);
    let v3: u32 = (v1 + x2);
    a0_1 = v3;
}
    var h0_1: vec4<f32>;
    let first2 = (worker + 512u) * 4u;
    let has2 = first2 < words.w[0].w;
    var a0_2: u32; { let x2 = select(0u, first2, has2);
    let v4: u32 = (v1 + x2);
    a0_2 = v4;
}
    var h0_2: vec4<f32>;
    let first3 = (worker + 768u) * 4u;
    let has3 = first3 < words.w[0].w;
    var a0_3: u32; { let x2 = select(0u, first3, has3);
    let v5: u32 = (v1 + x2);
    a0_3 = v5;
}
    var h0_3: vec4<f32>;
    if (((a0_0 | a0_1 | a0_2 | a0_3) & 3u) == 0u) {
h0_0 = lv_whole0(a0_0);
h0_1 = lv_whole0(a0_1);
h0_2 = lv_whole0(a0_2);
h0_3 = lv_whole0(a0_3);
} else {
h0_0 = lv0(a0_0);
h0_1 = lv0(a0_1);
h0_2 = lv0(a0_2);
h0_3 = lv0(a0_3);
}
    var x3 = (0.0f);
    if (has0) {
{ let x2 = first0 + 0u;
    let v6: f32 = (x3 + h0_0[0]);
    x3 = v6;
}
{ let x2 = first0 + 1u;
    let v7: f32 = (x3 + h0_0[1]);
    x3 = v7;
}
{ let x2 = first0 + 2u;
    let v8: f32 = (x3 + h0_0[2]);
    x3 = v8;
}
{ let x2 = first0 + 3u;
    let v9: f32 = (x3 + h0_0[3]);
    x3 = v9;
}
}
    if (has1) {
{ let x2 = first1 + 0u;
    let v10: f32 = (x3 + h0_1[0]);
    x3 = v10;
}
{ let x2 = first1 + 1u;
    let v11: f32 = (x3 + h0_1[1]);
    x3 = v11;
}
{ let x2 = first1 + 2u;
    let v12: f32 = (x3 + h0_1[2]);
    x3 = v12;
}
{ let x2 = first1 + 3u;
    let v13: f32 = (x3 + h0_1[3]);
    x3 = v13;
}
}
    if (has2) {
{ let x2 = first2 + 0u;
    let v14: f32 = (x3 + h0_2[0]);
    x3 = v14;
}
{ let x2 = first2 + 1u;
    let v15: f32 = (x3 + h0_2[1]);
    x3 = v15;
}
{ let x2 = first2 + 2u;
    let v16: f32 = (x3 + h0_2[2]);
    x3 = v16;
}
{ let x2 = first2 + 3u;
    let v17: f32 = (x3 + h0_2[3]);
    x3 = v17;
}
}
    if (has3) {
{ let x2 = first3 + 0u;
    let v18: f32 = (x3 + h0_3[0]);
    x3 = v18;
}
{ let x2 = first3 + 1u;
    let v19: f32 = (x3 + h0_3[1]);
    x3 = v19;
}
{ let x2 = first3 + 2u;
    let v20: f32 = (x3 + h0_3[2]);
    x3 = v20;
}
{ let x2 = first3 + 3u;
    let v21: f32 = (x3 + h0_3[3]);
    x3 = v21;
}
}
    sh0[lane] = x3; 
    workgroupBarrier();
    if (worker < 64u) {
{ let x4 = sh0[lane + 64u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 128u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 192u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 16u) {
{ let x4 = sh0[lane + 16u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 32u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 48u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 4u) {
{ let x4 = sh0[lane + 4u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 8u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
{ let x4 = sh0[lane + 12u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
sh0[lane] = x3; }
    workgroupBarrier();
    x3 = sh0[lane - worker]; 
    { let x4 = sh0[lane - worker + 1u]; 
    let v22: f32 = (x3 + x4);
    x3 = v22;
}
