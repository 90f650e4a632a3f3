fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
@group(0) @binding(0) var<storage, read> b0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b1: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> b2: array<vec4<f32>>;
struct Words { w: array<vec4<u32>, 4> }
@group(1) @binding(0) var<uniform> words: Words;
fn ld0(i: u32) -> f32 { return b0[i >> 2u][i & 3u]; }
fn lv_whole0(i: u32) -> vec4<f32> { let w = b0[i >> 2u]; return w; }
fn lv0(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole0(i); }
  return vec4<f32>(ld0(i), ld0(i + 1u), ld0(i + 2u), ld0(i + 3u));
}
fn ld1(i: u32) -> f32 { return b1[i >> 2u][i & 3u]; }
fn lv_whole1(i: u32) -> vec4<f32> { let w = b1[i >> 2u]; return w; }
fn lv1(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole1(i); }
  return vec4<f32>(ld1(i), ld1(i + 1u), ld1(i + 2u), ld1(i + 3u));
}
fn ld2(i: u32) -> f32 { return b2[i >> 2u][i & 3u]; }
fn lv_whole2(i: u32) -> vec4<f32> { let w = b2[i >> 2u]; return w; }
fn lv2(i: u32) -> vec4<f32> {
  if ((i & 3u) == 0u) { return lv_whole2(i); }
  return vec4<f32>(ld2(i), ld2(i + 1u), ld2(i + 2u), ld2(i + 3u));
}
fn st2(i: u32, v: f32) { b2[i >> 2u][i & 3u] = v; }
struct row_a { at: u32, f0: u32 }
fn row_of_a(x1: u32, x2: u32) -> row_a {
    let v0: u32 = (x1 * words.w[2].y);
    let v1: u32 = (words.w[2].x + v0);
    let v2: u32 = (x2 * words.w[2].z);
    let v3: u32 = (v1 + v2);
    return row_a(x2, v3);
}
struct depth_a { at: u32 }
fn depth_of_a(x1: u32, x4: u32) -> depth_a {
    return depth_a(x4);
}
fn at_a(x1: u32, r: row_a, d: depth_a) -> u32 {
    let x2 = r.at; let x4 = d.at;
    let v4: u32 = (r.f0 + x4);
    return v4;
}
fn four_a(x1: u32, r: row_a, d: depth_a, count: u32) -> vec4<f32> {
    var v = vec4<f32>();
    if (count == 0u) { return v; }
    let at = at_a(x1, r, d);
    if (count >= 4u) { return lv0(at); }
    v.x = f32(ld0(at + 0u));
    if (count > 1u) { v.y = f32(ld0(at + 1u)); }
    if (count > 2u) { v.z = f32(ld0(at + 2u)); }
    return v;
}
struct row_b { at: u32, f0: u32 }
fn row_of_b(x1: u32, x3: u32) -> row_b {
    let v5: u32 = (x1 * words.w[3].x);
    let v6: u32 = (words.w[2].w + v5);
    let v7: u32 = (v6 + x3);
    return row_b(x3, v7);
}
struct depth_b { at: u32, f0: u32 }
fn depth_of_b(x1: u32, x4: u32) -> depth_b {
    let v8: u32 = (x4 * words.w[3].y);
    return depth_b(x4, v8);
}
fn at_b(x1: u32, r: row_b, d: depth_b) -> u32 {
    let x3 = r.at; let x4 = d.at;
    let v9: u32 = (r.f0 + d.f0);
    return v9;
}
fn four_b(x1: u32, r: row_b, d: depth_b, count: u32) -> vec4<f32> {
    var v = vec4<f32>();
    if (count == 0u) { return v; }
    let at = at_b(x1, r, d);
    if (count >= 4u) { return lv1(at); }
    v.x = f32(ld1(at + 0u));
    if (count > 1u) { v.y = f32(ld1(at + 1u)); }
    if (count > 2u) { v.z = f32(ld1(at + 2u)); }
    return v;
}
struct row_c { at: u32, f0: u32 }
fn row_of_c(x1: u32, x2: u32) -> row_c {
    let v11: u32 = (x1 * words.w[3].z);
    let v12: u32 = (x2 * words.w[3].w);
    let v13: u32 = (v11 + v12);
    return row_c(x2, v13);
}
struct depth_c { at: u32 }
fn depth_of_c(x1: u32, x3: u32) -> depth_c {
    return depth_c(x3);
}
fn finish(x1: u32, r: row_c, d: depth_c, x5: f32) {
    let x2 = r.at; let x3 = d.at;
    let v10: u32 = (r.f0 + x3);
    st2(v10, x5);
}
struct result_c { v0: f32, }
fn result_of_c(x1: u32, r: row_c, d: depth_c, x5: f32) -> result_c {
    let x2 = r.at; let x3 = d.at;
    return result_c(x5);
}
struct place_c { v0: u32, }
fn place_of_c(x1: u32, r: row_c, d: depth_c, x5: f32) -> place_c {
    let x2 = r.at; let x3 = d.at;
    let v14: u32 = (r.f0 + x3);
    return place_c(v14);
}
fn four_sums(x1: u32, r: row_c, d0: depth_c, d1: depth_c, d2: depth_c, d3: depth_c, s: vec4<f32>) {
  if (r.at >= words.w[0].x || d0.at >= words.w[0].y) { return; }
  if (d3.at < words.w[0].y) {
    let at = place_of_c(x1, r, d0, s.x);
    if (((at.v0) & 3u) == 0u) {
      let e0 = result_of_c(x1, r, d0, s.x);
      let e1 = result_of_c(x1, r, d1, s.y);
      let e2 = result_of_c(x1, r, d2, s.z);
      let e3 = result_of_c(x1, r, d3, s.w);
      let v0 = vec4(e0.v0, e1.v0, e2.v0, e3.v0);
      b2[at.v0 >> 2u] = v0;
      return;
    }
  }
  var all = array<depth_c, 4>(d0, d1, d2, d3);
  let count = min(words.w[0].y - d0.at, 4u);
  for (var j = 0u; j < count; j++) { finish(x1, r, all[j], s[j]); }
}
var<workgroup> ta: array<vec4<f32>, 256>;
var<workgroup> tb: array<vec4<f32>, 256>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let number = wg.y * grid.x + wg.x;
  if (number >= words.w[1].y) { return; }
  let z = number / (words.w[0].w * words.w[1].x);
  let in_plane = number % (words.w[0].w * words.w[1].x);
  let band = in_plane / (8u * words.w[1].x);
  let in_band = in_plane % (8u * words.w[1].x);
  let height = min(words.w[0].w - band * 8u, 8u);
  let m0 = (band * 8u + in_band % height) * 64u;
  let n0 = (in_band / height) * 64u;
  let batch = z / words.w[1].z;
  let begin = (z % words.w[1].z) * words.w[1].w;
  let end = min(begin + words.w[1].w, words.w[0].z);
  let ty = lane / 8u;
  let tx = lane % 8u;
  var p0_0 = vec4<f32>(0.0);
  var p0_1 = vec4<f32>(0.0);
  var p0_2 = vec4<f32>(0.0);
  var p0_3 = vec4<f32>(0.0);
  let ua0 = (lane - 0u) % 64u + 0u;
  let oa0 = ua0 / 4u;
  let ka0 = ua0 % 4u;
  let ra0_0 = row_of_a(batch, m0 + oa0 * 4u + 0u);
  let ra0_1 = row_of_a(batch, m0 + oa0 * 4u + 1u);
  let ra0_2 = row_of_a(batch, m0 + oa0 * 4u + 2u);
  let ra0_3 = row_of_a(batch, m0 + oa0 * 4u + 3u);
  let ub0 = (lane - 64u) % 64u + 0u;
  let ob0 = ub0 % 16u;
  let kb0 = ub0 / 16u;
  let rb0_0 = row_of_b(batch, n0 + ob0 * 4u + 0u);
  var s0_0 = vec4<f32>(0.0);
  var s1_0 = vec4<f32>(0.0);
  var s2_0 = vec4<f32>(0.0);
  var s3_0 = vec4<f32>(0.0);
  var s0_1 = vec4<f32>(0.0);
  var s1_1 = vec4<f32>(0.0);
  var s2_1 = vec4<f32>(0.0);
  var s3_1 = vec4<f32>(0.0);
  for (var k0 = begin; ; k0 += 16u) {
    if (k0 < end) {
      if (lane < 64u) {
      let d0 = depth_of_a(batch, k0 + ka0 * 4u + 0u);
      let at0 = at_a(batch, ra0_0, d0);
      let at1 = at_a(batch, ra0_1, d0);
      let at2 = at_a(batch, ra0_2, d0);
      let at3 = at_a(batch, ra0_3, d0);
      if (d0.at + 4u <= end && ra0_3.at < words.w[0].x && ((at0 | at1 | at2 | at3) & 3u) == 0u) {
        p0_0 = lv_whole0(at0);
        p0_1 = lv_whole0(at1);
        p0_2 = lv_whole0(at2);
        p0_3 = lv_whole0(at3);
      } else {
        p0_0 = four_a(batch, ra0_0, d0, select(0u, end - min(d0.at, end), ra0_0.at < words.w[0].x));
        p0_1 = four_a(batch, ra0_1, d0, select(0u, end - min(d0.at, end), ra0_1.at < words.w[0].x));
        p0_2 = four_a(batch, ra0_2, d0, select(0u, end - min(d0.at, end), ra0_2.at < words.w[0].x));
        p0_3 = four_a(batch, ra0_3, d0, select(0u, end - min(d0.at, end), ra0_3.at < words.w[0].x));
      }
      }
      if (lane >= 64u) {
      let d0 = depth_of_b(batch, k0 + kb0 * 4u + 0u);
      let d1 = depth_of_b(batch, k0 + kb0 * 4u + 1u);
      let d2 = depth_of_b(batch, k0 + kb0 * 4u + 2u);
      let d3 = depth_of_b(batch, k0 + kb0 * 4u + 3u);
      let at0 = at_b(batch, rb0_0, d0);
      let at1 = at_b(batch, rb0_0, d1);
      let at2 = at_b(batch, rb0_0, d2);
      let at3 = at_b(batch, rb0_0, d3);
      if (rb0_0.at + 4u <= words.w[0].y && d3.at < end && ((at0 | at1 | at2 | at3) & 3u) == 0u) {
        p0_0 = lv_whole1(at0);
        p0_1 = lv_whole1(at1);
        p0_2 = lv_whole1(at2);
        p0_3 = lv_whole1(at3);
      } else {
        p0_0 = four_b(batch, rb0_0, d0, select(0u, words.w[0].y - min(rb0_0.at, words.w[0].y), d0.at < end));
        p0_1 = four_b(batch, rb0_0, d1, select(0u, words.w[0].y - min(rb0_0.at, words.w[0].y), d1.at < end));
        p0_2 = four_b(batch, rb0_0, d2, select(0u, words.w[0].y - min(rb0_0.at, words.w[0].y), d2.at < end));
        p0_3 = four_b(batch, rb0_0, d3, select(0u, words.w[0].y - min(rb0_0.at, words.w[0].y), d3.at < end));
      }
      }
    }
    if (k0 > begin) {
      for (var d = 0u; d < 16u; d++) {
        let a0 = ta[d * 16u + ((ty + 0u) ^ (((d >> 2u) * 2u) & 15u))];
        let b0 = tb[d * 16u + (tx + 0u)];
        let b1 = tb[d * 16u + (tx + 8u)];
        s0_0 = fma(vec4<f32>(a0.x), b0, s0_0);
        s0_1 = fma(vec4<f32>(a0.x), b1, s0_1);
        s1_0 = fma(vec4<f32>(a0.y), b0, s1_0);
        s1_1 = fma(vec4<f32>(a0.y), b1, s1_1);
        s2_0 = fma(vec4<f32>(a0.z), b0, s2_0);
        s2_1 = fma(vec4<f32>(a0.z), b1, s2_1);
        s3_0 = fma(vec4<f32>(a0.w), b0, s3_0);
        s3_1 = fma(vec4<f32>(a0.w), b1, s3_1);
      }
    }
    if (k0 >= end) { break; }
    workgroupBarrier();
    if (lane < 64u) {
      ta[(ka0 * 4u + 0u) * 16u + (oa0 ^ ((ka0 * 2u) & 15u))] = vec4<f32>(p0_0.x, p0_1.x, p0_2.x, p0_3.x);
      ta[(ka0 * 4u + 1u) * 16u + (oa0 ^ ((ka0 * 2u) & 15u))] = vec4<f32>(p0_0.y, p0_1.y, p0_2.y, p0_3.y);
      ta[(ka0 * 4u + 2u) * 16u + (oa0 ^ ((ka0 * 2u) & 15u))] = vec4<f32>(p0_0.z, p0_1.z, p0_2.z, p0_3.z);
      ta[(ka0 * 4u + 3u) * 16u + (oa0 ^ ((ka0 * 2u) & 15u))] = vec4<f32>(p0_0.w, p0_1.w, p0_2.w, p0_3.w);
    }
    if (lane >= 64u) {
      tb[(kb0 * 4u + 0u) * 16u + ob0] = vec4<f32>(p0_0.x, p0_0.y, p0_0.z, p0_0.w);
      tb[(kb0 * 4u + 1u) * 16u + ob0] = vec4<f32>(p0_1.x, p0_1.y, p0_1.z, p0_1.w);
      tb[(kb0 * 4u + 2u) * 16u + ob0] = vec4<f32>(p0_2.x, p0_2.y, p0_2.z, p0_2.w);
      tb[(kb0 * 4u + 3u) * 16u + ob0] = vec4<f32>(p0_3.x, p0_3.y, p0_3.z, p0_3.w);
    }
    workgroupBarrier();
  }
  workgroupBarrier();
  let rounds = min(2u, words.w[1].y + 1u);
  let e0_0 = depth_of_c(z, n0 + (tx + 0u) * 4u + 0u);
  let e0_1 = depth_of_c(z, n0 + (tx + 0u) * 4u + 1u);
  let e0_2 = depth_of_c(z, n0 + (tx + 0u) * 4u + 2u);
  let e0_3 = depth_of_c(z, n0 + (tx + 0u) * 4u + 3u);
  tb[0u + lane] = s0_0;
  tb[128u + lane] = s1_0;
  for (var i = 0u; i < rounds; i++) {
    four_sums(z, row_of_c(z, m0 + (ty + 0u) * 4u + 0u + i), e0_0, e0_1, e0_2, e0_3, tb[i * 128u + lane]);
  }
  tb[0u + lane] = s2_0;
  tb[128u + lane] = s3_0;
  for (var i = 0u; i < rounds; i++) {
    four_sums(z, row_of_c(z, m0 + (ty + 0u) * 4u + 2u + i), e0_0, e0_1, e0_2, e0_3, tb[i * 128u + lane]);
  }
  let e1_0 = depth_of_c(z, n0 + (tx + 8u) * 4u + 0u);
  let e1_1 = depth_of_c(z, n0 + (tx + 8u) * 4u + 1u);
  let e1_2 = depth_of_c(z, n0 + (tx + 8u) * 4u + 2u);
  let e1_3 = depth_of_c(z, n0 + (tx + 8u) * 4u + 3u);
  tb[0u + lane] = s0_1;
  tb[128u + lane] = s1_1;
  for (var i = 0u; i < rounds; i++) {
    four_sums(z, row_of_c(z, m0 + (ty + 0u) * 4u + 0u + i), e1_0, e1_1, e1_2, e1_3, tb[i * 128u + lane]);
  }
  tb[0u + lane] = s2_1;
  tb[128u + lane] = s3_1;
  for (var i = 0u; i < rounds; i++) {
    four_sums(z, row_of_c(z, m0 + (ty + 0u) * 4u + 2u + i), e1_0, e1_1, e1_2, e1_3, tb[i * 128u + lane]);
  }
}
