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
    var x3 = (0.0f);
    let v0: u32 = (x1 * words.w[0].y);
    let v1: u32 = (words.w[0].x + v0);
    for (var first = worker * 4u; first < words.w[0].w; first += 1024u) {
if (first + 4u <= words.w[0].w) {
let x2 = first;
    let v5: u32 = (v1 + x2);
    let w0 = lv0(v5);
{ let x2 = first + 0u;
    let v8: f32 = (x3 + w0[0]);
    x3 = v8;
}
{ let x2 = first + 1u;
    let v9: f32 = (x3 + w0[1]);
    x3 = v9;
}
{ let x2 = first + 2u;
    let v10: f32 = (x3 + w0[2]);
    x3 = v10;
}
{ let x2 = first + 3u;
    let v11: f32 = (x3 + w0[3]);
    x3 = v11;
}
} else {
for (var x2 = first; x2 < words.w[0].w; x2++) {
    let v2: u32 = (v1 + x2);
    let v3: f32 = ld0(v2);
    let v4: f32 = (x3 + v3);
    x3 = v4;
} } }
    sh0[lane] = x3; 
    workgroupBarrier();
    if (worker < 64u) {
{ let x4 = sh0[lane + 64u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 128u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 192u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 16u) {
{ let x4 = sh0[lane + 16u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 32u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 48u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 4u) {
{ let x4 = sh0[lane + 4u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 8u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
{ let x4 = sh0[lane + 12u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
sh0[lane] = x3; }
    workgroupBarrier();
    x3 = sh0[lane - worker]; 
    { let x4 = sh0[lane - worker + 1u]; 
    let v12: f32 = (x3 + x4);
    x3 = v12;
}
