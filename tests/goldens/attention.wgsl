fn exp_(x: f32) -> f32 {
  let y = clamp(x, -104.0f, 88.8f);
  let n = round(y * 1.44269504f);
  let r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  let p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
    + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  return select(scale2(p * r * r + r + 1.0f, i32(n)), x, is_nan(x));
}
fn group(wg: vec3<u32>, grid: vec3<u32>) -> u32 { return wg.y * grid.x + wg.x; }
fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn log_(x: f32) -> f32 {
  if (is_nan(x) || x < 0.0f) { return no_float(0x7fc00000u); }
  if (x == 0.0f) { return no_float(0xff800000u); }
  if (is_inf(x)) { return x; }
  let s = split(x);
  let m = s.x;
  let p = ((((((((7.0376836292e-2f * m - 1.1514610310e-1f) * m + 1.1676998740e-1f) * m - 1.2420140846e-1f) * m
    + 1.4249322787e-1f) * m - 1.6668057665e-1f) * m + 2.0000714765e-1f) * m - 2.4999993993e-1f) * m + 3.3333331174e-1f);
  let z = m * m;
  var y = p * m * z + s.y * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + s.y * 0.693359375f;
}
fn no_float(bits: u32) -> f32 { return bitcast<f32>(bits | (words.w[0].x & 0u)); }
fn scale2(x: f32, n: i32) -> f32 {
  let h = n / 2i;
  return x * bitcast<f32>(u32(h + 127i) << 23u) * bitcast<f32>(u32(n - h + 127i) << 23u);
}
fn split(x: f32) -> vec2<f32> {
  var b = bitcast<u32>(x);
  var e = -127.0f;
  // Devices may flush denormal operands of a multiplication to 0.
  if (b < 0x800000u) { let s = 23u - firstLeadingBit(b); b <<= s; e -= f32(s); }
  e += f32(b >> 23u);
  var m = bitcast<f32>((b & 0x7fffffu) | 0x3f800000u);
  if (m > 1.41421356f) { m *= 0.5f; e += 1.0f; }
  return vec2<f32>(m - 1.0f, e);
}
@group(0) @binding(0) var<storage, read> b0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b1: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> b2: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
@group(0) @binding(4) var<storage, read_write> b4: array<f32>;
struct Words { w: array<vec4<u32>, 7> }
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
fn ld3(i: u32) -> f32 { return b3[i]; }
fn st3(i: u32, v: f32) { b3[i] = v; }
fn ld4(i: u32) -> f32 { return b4[i]; }
fn st4(i: u32, v: f32) { b4[i] = v; }
fn weight(s: f32, m: f32) -> f32 {
  if (s <= -3.0e38f) { return 0.0; }
  return exp_(s - m);
}
fn queries() -> u32 { return words.w[0].x; }
fn keys() -> u32 { return words.w[0].y; }
fn dim() -> u32 { return words.w[0].z; }
fn heads() -> u32 { return words.w[0].w; }
fn group_size() -> u32 { return words.w[1].x; }
fn scale() -> f32 { return bitcast<f32>(words.w[1].y); }
fn at_q(b: u32, h: u32, r: u32) -> u32 { return words.w[1].z + b * words.w[1].w + h * words.w[2].x + r * words.w[2].y; }
fn four_q(at: u32, d: u32) -> vec4<f32> {
  let n = dim() - min(d, dim());
  if (n >= 4u) { return lv0(at + d); }
  var v = vec4<f32>(0.0);
  if (n > 0u) { v.x = ld0(at + d); }
  if (n > 1u) { v.y = ld0(at + (d + 1u)); }
  if (n > 2u) { v.z = ld0(at + (d + 2u)); }
  return v;
}
fn at_k(b: u32, h: u32, r: u32) -> u32 { return words.w[2].z + b * words.w[2].w + h * words.w[3].x + r * words.w[3].y; }
fn four_k(at: u32, d: u32) -> vec4<f32> {
  let n = dim() - min(d, dim());
  if (n >= 4u) { return lv1(at + d); }
  var v = vec4<f32>(0.0);
  if (n > 0u) { v.x = ld1(at + d); }
  if (n > 1u) { v.y = ld1(at + (d + 1u)); }
  if (n > 2u) { v.z = ld1(at + (d + 2u)); }
  return v;
}
fn at_v(b: u32, h: u32, r: u32) -> u32 { return words.w[3].z + b * words.w[3].w + h * words.w[4].x + r * words.w[4].y; }
fn four_v(at: u32, d: u32) -> vec4<f32> {
  let n = dim() - min(d, dim());
  if (n >= 4u) { return lv2(at + d); }
  var v = vec4<f32>(0.0);
  if (n > 0u) { v.x = ld2(at + d); }
  if (n > 1u) { v.y = ld2(at + (d + 1u)); }
  if (n > 2u) { v.z = ld2(at + (d + 2u)); }
  return v;
}
fn score(b: u32, h: u32, query: u32, key: u32, s: f32) -> f32 {
  if (query >= queries() || key >= keys() || key > query) { return -3.0e38f; }
  let v = s * scale();
  return select(v, -3.0e38f, v < -3.0e38f);
}
fn at_out(b: u32, h: u32, r: u32) -> u32 { return 0u + b * words.w[4].z + h * words.w[4].w + r * words.w[5].x; }
fn put_out(at: u32, d: u32, v: vec4<f32>) {
  let n = dim() - min(d, dim());
  if (n > 0u) { st3(at + d, v.x); }
  if (n > 1u) { st3(at + (d + 1u), v.y); }
  if (n > 2u) { st3(at + (d + 2u), v.z); }
  if (n > 3u) { st3(at + (d + 3u), v.w); }
}
fn at_saved(b: u32, h: u32, r: u32) -> u32 { return 0u + b * words.w[5].y + h * words.w[5].z + r * words.w[5].w; }
var<workgroup> part: array<f32, 512>;
fn total() -> u32 { return words.w[6].x; }
fn tiles() -> u32 { return words.w[6].y; }
var<workgroup> left: array<vec4<f32>, 512>;
var<workgroup> right: array<vec4<f32>, 256>;
fn spot(row: u32, c: u32) -> u32 { return row * 8u + (c ^ ((row >> 2u) & 7u)); }
fn four_dots(x: vec4<f32>, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(dot(x, a), dot(x, b), dot(x, c), dot(x, d));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let number = group(wg, grid);
  if (number >= total()) { return; }
  let row0 = (number % tiles()) * 64u;
  let ty = lane / 8u;
  let tx = lane % 8u;
  let b = (number / tiles()) / heads();
  let h = (number / tiles()) % heads();
  let kh = h / group_size();
  var m0 = -3.0e38f;
  var m1 = -3.0e38f;
  var l0 = 0.0f;
  var l1 = 0.0f;
  var o0_0 = vec4<f32>(0.0);
  var o1_0 = vec4<f32>(0.0);
  for (var col0 = 0u; col0 < min(keys(), row0 + 64u); col0 += 32u) {
  var s0 = vec4<f32>(0.0);
  var s1 = vec4<f32>(0.0);
  for (var c = 0u; c < 1u; c++) {
  workgroupBarrier();
  for (var i = 0u; i < 64u; i += 32u) {
    var v = vec4<f32>(0.0);
    let r = row0 + ty + i;
    if (r < queries()) { v = four_q(at_q(b, h, r), c * 32u + tx * 4u); }
    left[spot(ty + i, tx)] = v;
  }
  { var v = vec4<f32>(0.0);
    if (col0 + ty < keys()) { v = four_k(at_k(b, kh, col0 + ty), c * 32u + tx * 4u); }
    right[spot(ty, tx)] = v; }
  workgroupBarrier();
  for (var j = 0u; j < 8u; j++) {
    let y0 = right[spot(tx * 4u, j)]; let y1 = right[spot(tx * 4u + 1u, j)];
    let y2 = right[spot(tx * 4u + 2u, j)]; let y3 = right[spot(tx * 4u + 3u, j)];
    s0 += four_dots(left[spot(ty, j)], y0, y1, y2, y3);
    s1 += four_dots(left[spot(ty + 32u, j)], y0, y1, y2, y3);
  }
  }
  s0.x = score(b, h, row0 + ty + 0u, col0 + tx * 4u + 0u, s0.x);
  s0.y = score(b, h, row0 + ty + 0u, col0 + tx * 4u + 1u, s0.y);
  s0.z = score(b, h, row0 + ty + 0u, col0 + tx * 4u + 2u, s0.z);
  s0.w = score(b, h, row0 + ty + 0u, col0 + tx * 4u + 3u, s0.w);
  s1.x = score(b, h, row0 + ty + 32u, col0 + tx * 4u + 0u, s1.x);
  s1.y = score(b, h, row0 + ty + 32u, col0 + tx * 4u + 1u, s1.y);
  s1.z = score(b, h, row0 + ty + 32u, col0 + tx * 4u + 2u, s1.z);
  s1.w = score(b, h, row0 + ty + 32u, col0 + tx * 4u + 3u, s1.w);
  part[lane] = max(max(s0.x, s0.y), max(s0.z, s0.w));
  part[lane + 256u] = max(max(s1.x, s1.y), max(s1.z, s1.w));
  workgroupBarrier();
  var n0 = m0;
  for (var i = 0u; i < 8u; i++) { n0 = max(n0, part[0u + ty * 8u + i]); }
  let keep0 = exp_(m0 - n0);
  m0 = n0;
  let p0 = vec4<f32>(weight(s0.x, n0), weight(s0.y, n0), weight(s0.z, n0), weight(s0.w, n0));
  l0 = l0 * keep0 + ((p0.x + p0.y) + (p0.z + p0.w));
  o0_0 *= keep0;
  var n1 = m1;
  for (var i = 0u; i < 8u; i++) { n1 = max(n1, part[256u + ty * 8u + i]); }
  let keep1 = exp_(m1 - n1);
  m1 = n1;
  let p1 = vec4<f32>(weight(s1.x, n1), weight(s1.y, n1), weight(s1.z, n1), weight(s1.w, n1));
  l1 = l1 * keep1 + ((p1.x + p1.y) + (p1.z + p1.w));
  o1_0 *= keep1;
  let y0 = p0;
  let y1 = p1;
  workgroupBarrier();
  left[spot(ty, tx)] = y0; left[spot(ty + 32u, tx)] = y1;
  workgroupBarrier();
  { var v = vec4<f32>(0.0);
    if (col0 + ty < keys()) { v = four_v(at_v(b, kh, col0 + ty), 0u + tx * 4u); }
    right[spot(ty, tx)] = v; }
  workgroupBarrier();
  for (var j = 0u; j < 8u; j++) {
    let p = left[spot(ty, j)]; let q = left[spot(ty + 32u, j)];
    { let v = right[spot(j * 4u + 0u, tx)]; o0_0 = fma(vec4<f32>(p.x), v, o0_0); o1_0 = fma(vec4<f32>(q.x), v, o1_0); }
    { let v = right[spot(j * 4u + 1u, tx)]; o0_0 = fma(vec4<f32>(p.y), v, o0_0); o1_0 = fma(vec4<f32>(q.y), v, o1_0); }
    { let v = right[spot(j * 4u + 2u, tx)]; o0_0 = fma(vec4<f32>(p.z), v, o0_0); o1_0 = fma(vec4<f32>(q.z), v, o1_0); }
    { let v = right[spot(j * 4u + 3u, tx)]; o0_0 = fma(vec4<f32>(p.w), v, o0_0); o1_0 = fma(vec4<f32>(q.w), v, o1_0); }
  }
  }
  workgroupBarrier();
  part[lane] = l0;
  part[lane + 256u] = l1;
  workgroupBarrier();
  l0 = 0.0;
  l1 = 0.0;
  for (var i = 0u; i < 8u; i++) { l0 += part[ty * 8u + i]; l1 += part[256u + ty * 8u + i]; }
  // Rows in which no score counts are 0.
  let f0 = select(1.0 / l0, 0.0, l0 == 0.0);
  let f1 = select(1.0 / l1, 0.0, l1 == 0.0);
  if (row0 + ty + 0u < queries()) {
    let at = at_out(b, h, row0 + ty + 0u);
    put_out(at, 0u + tx * 4u, o0_0 * f0);
  }
  if (row0 + ty + 32u < queries()) {
    let at = at_out(b, h, row0 + ty + 32u);
    put_out(at, 0u + tx * 4u, o1_0 * f1);
  }
  if (tx == 0u && row0 + ty < queries()) {
    st4(at_saved(b, h, row0 + ty), select(m0 + log_(l0), 0.0, l0 == 0.0));
  }
  if (tx == 0u && row0 + ty + 32u < queries()) {
    st4(at_saved(b, h, row0 + ty + 32u), select(m1 + log_(l1), 0.0, l1 == 0.0));
  }
}
