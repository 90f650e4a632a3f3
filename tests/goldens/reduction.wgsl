fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
struct Words { w: array<vec4<u32>, 1> }
@group(1) @binding(0) var<uniform> words: Words;
fn ld0(i: u32) -> f32 { return b0[i]; }
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
    for (var x2 = worker; x2 < words.w[0].w; x2 += 256u) {
    let v2: u32 = (v1 + x2);
    let v3: f32 = ld0(v2);
    let v4: f32 = (x3 + v3);
    x3 = v4;
}
    sh0[lane] = x3; 
    workgroupBarrier();
    if (worker < 64u) {
{ let x4 = sh0[lane + 64u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 128u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 192u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 16u) {
{ let x4 = sh0[lane + 16u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 32u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 48u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
sh0[lane] = x3; }
    workgroupBarrier();
    if (worker < 4u) {
{ let x4 = sh0[lane + 4u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 8u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
{ let x4 = sh0[lane + 12u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
sh0[lane] = x3; }
    workgroupBarrier();
    x3 = sh0[lane - worker]; 
    { let x4 = sh0[lane - worker + 1u]; 
    let v5: f32 = (x3 + x4);
    x3 = v5;
}
