// Layered layout. Boxes are sized from within; in each open box its children stand in layers, edges lead down,
// and long columns of layers are broken like those of a newspaper.

const NODE_HEIGHT = 42;
const PAD = 14;
const TITLE = 30;
const GAP_X = 22;
const GAP_Y = 26;
const GUTTER = 46; // between columns
const MAX_DUMMIES = 3000;

// Sizes and places all that is visible. Places are relative to the box around. `links` are [from, to, title].
function arrange(tree, links, { measure, aspect, wide }) {
  const shown = new Map(); // a box to the one that stands for it: itself, or the closed one around
  const open = [];
  const mark = (item, by) => {
    shown.set(item, by);
    const visible = by === item && item.open && item.children;
    if (visible) open.push(item);
    for (const child of item.children ?? []) mark(child, visible ? child : by);
  };
  mark(tree.root, tree.root);
  for (const item of open) item.between = new Map();
  for (const item of tree.all) item.enters = item.exits = false;
  for (const [from, to, title] of links) lift(shown.get(from), shown.get(to), title);
  for (const item of open.reverse()) place(item);
  return open;

  // Enters an edge in the box in which its ends part.
  function lift(from, to, title) {
    if (!from || !to || from === to) return;
    const [first, last] = [from, to];
    while (from.depth > to.depth) from = from.parent;
    while (to.depth > from.depth) to = to.parent;
    if (from === to) return; // from a box into itself
    while (from.parent !== to.parent) [from, to] = [from.parent, to.parent];
    for (let item = first; item !== from; item = item.parent) item.exits = true;
    for (let item = last; item !== to; item = item.parent) item.enters = true;
    const { between } = from.parent;
    const key = `${from.number} ${to.number}`;
    const known = between.get(key);
    if (known) known.count += 1;
    else between.set(key, { from, to, title, count: 1, back: from.index > to.index });
  }

  function place(item) {
    const children = item.children;
    for (const child of children) if (!(child.open && child.children)) Object.assign(child, measure(child));
    const at = new Map(children.map((child, index) => [child, index]));
    const edges = [...item.between.values()];
    const forward = edges.filter((edge) => !edge.back);
    const back = edges.filter((edge) => edge.back);
    const result = layered(
      children,
      forward.map(({ from, to }) => [at.get(from), at.get(to)]),
      { aspect, perLayer: wide ? Math.max(5, Math.ceil(Math.sqrt(children.length) * 1.3)) : Infinity },
    );
    const top = item.kind === "root" ? PAD : TITLE + 12;
    children.forEach((child, index) => {
      child.x = result.at[index].x + PAD;
      child.y = result.at[index].y + top;
    });
    forward.forEach((edge, index) => {
      edge.route = result.routes[index].map((part) => part.map(([x, y]) => [x + PAD, y + top]));
    });
    let right = result.width + 2 * PAD;
    for (const edge of back) {
      const out = Math.max(...children.map((child) => child.x + child.w)) + 16;
      edge.route = [returning(edge.from, edge.to, out)];
      right = Math.max(right, out + PAD + 4);
    }
    item.edges = [...forward, ...back];
    const title = measure(item, true);
    item.w = Math.max(right, title.w);
    item.h = result.height + top + PAD + 2;
    const shift = (item.w - right) / 2;
    if (shift > 0) {
      for (const child of children) child.x += shift;
      for (const edge of item.edges)
        edge.route = edge.route.map((part) => part.map(([x, y]) => [x + shift, y]));
    }
  }

  // The way of a loop's edge back, on the right side.
  function returning(from, to, out) {
    const [low, high] = [from.y + from.h / 2, to.y + Math.min(to.h / 2, 20)];
    return [
      [from.x + from.w, low],
      [out, low],
      [out, high],
      [to.x + to.w, high],
    ];
  }
}

// Places for boxes { w, h } with edges [from, to] of indices that rise. A route is a list of parts: two points
// are a curve, more are straight lines.
function layered(items, edges, { aspect, perLayer }) {
  if (!items.length) return { width: 80, height: 20, at: [], routes: [] };
  const rank = ranks(items.length, edges, perLayer);
  const { layers, chains, above, below, size } = withDummies(items, edges, rank);
  untangle(layers, above, below);
  const x = across(layers, above, below, size);

  // Down: each layer is as high as its highest box.
  const height = layers.map((layer) => Math.max(...layer.map((v) => size(v).h)));
  const columns = breakUp(height, layers.map(extent), aspect);

  const y = [];
  const columnOf = [];
  const sides = [];
  let left = 0;
  let lowest = 0;
  columns.forEach(([from, to], column) => {
    let [least, most] = [Infinity, -Infinity];
    for (let r = from; r < to; r += 1) {
      const { left: a, right: b } = extent(layers[r]);
      [least, most] = [Math.min(least, a), Math.max(most, b)];
    }
    let top = 0;
    for (let r = from; r < to; r += 1) {
      for (const v of layers[r]) x[v] += left - least;
      y[r] = top;
      columnOf[r] = column;
      top += height[r] + GAP_Y;
    }
    lowest = Math.max(lowest, top - GAP_Y);
    sides.push([left, left + most - least]);
    left += most - least + GUTTER;
  });

  const ends = (v, r) => {
    const box = size(v);
    const middle = y[r] + height[r] / 2;
    return items[v] ? [middle - box.h / 2, middle + box.h / 2] : [y[r], y[r] + height[r]];
  };
  const at = items.map((item, v) => ({ x: x[v] - item.w / 2, y: ends(v, rank[v])[0] }));
  const routes = chains.map((chain) => {
    const parts = [];
    for (let i = 1; i < chain.length; i += 1) {
      const [a, b] = [chain[i - 1], chain[i]];
      const [ra, rb] = [rank[a], rank[b]];
      const [from, to] = [
        [x[a], ends(a, ra)[1]],
        [x[b], ends(b, rb)[0]],
      ];
      if (a >= items.length) parts.push([[x[a], ends(a, ra)[0]], from]);
      if (columnOf[ra] === columnOf[rb]) {
        parts.push([from, to]);
      } else {
        const gutter = sides[columnOf[rb]][0] - GUTTER / 2;
        const under = columnOf[rb] === columnOf[ra] + 1 && ra + 1 === columns[columnOf[rb]][0];
        const low = under ? Math.max(...layers[ra].map((v) => ends(v, ra)[1])) + 12 : from[1] + 10;
        parts.push([from, [from[0], low], [gutter, low], [gutter, to[1] - 12], [to[0], to[1] - 12], to]);
      }
    }
    return parts;
  });
  return { width: left - GUTTER, height: lowest, at, routes };

  function extent(layer) {
    const first = layer[0];
    const last = layer.at(-1);
    return { left: x[first] - size(first).w / 2, right: x[last] + size(last).w / 2 };
  }
}

// The layer of each item: below all that lead to it, in one that is not full.
function ranks(number, edges, perLayer) {
  const rank = new Array(number).fill(0);
  const into = Array.from({ length: number }, () => []);
  for (const [from, to] of edges) into[to].push(from);
  const full = [];
  for (let v = 0; v < number; v += 1) {
    let r = into[v].reduce((most, from) => Math.max(most, rank[from] + 1), 0);
    while ((full[r] ?? 0) >= perLayer) r += 1;
    full[r] = (full[r] ?? 0) + 1;
    rank[v] = r;
  }
  // Layers that stayed empty would be gaps.
  const used = [...new Set(rank)].sort((a, b) => a - b);
  const dense = new Map(used.map((r, index) => [r, index]));
  return rank.map((r) => dense.get(r));
}

// Edges over several layers get a thin place in each, so that they lead past the boxes.
function withDummies(items, edges, rank) {
  const layers = Array.from({ length: Math.max(...rank) + 1 }, () => []);
  rank.forEach((r, v) => layers[r].push(v));
  const above = items.map(() => []);
  const below = items.map(() => []);
  const needed = edges.reduce((sum, [from, to]) => sum + rank[to] - rank[from] - 1, 0);
  let next = items.length;
  const link = (a, b) => {
    below[a].push(b);
    above[b].push(a);
  };
  const chains = edges.map(([from, to]) => {
    const chain = [from];
    for (let r = rank[from] + 1; r < rank[to] && needed <= MAX_DUMMIES; r += 1) {
      above.push([]);
      below.push([]);
      rank[next] = r;
      layers[r].push(next);
      chain.push(next++);
    }
    chain.push(to);
    for (let i = 1; i < chain.length; i += 1) {
      if (rank[chain[i]] === rank[chain[i - 1]] + 1) link(chain[i - 1], chain[i]);
    }
    return chain;
  });
  const thin = { w: 6, h: 0 };
  return { layers, chains, above, below, size: (v) => items[v] ?? thin };
}

// Orders each layer by the mean place of what it is linked to, down and up a few times.
function untangle(layers, above, below) {
  const place = [];
  const note = (layer) => layer.forEach((v, index) => (place[v] = index));
  layers.forEach(note);
  const sweep = (layer, links) => {
    if (layer.length < 2) return;
    const wanted = new Map(
      layer.map((v) => [
        v,
        links[v].length ? links[v].reduce((sum, u) => sum + place[u], 0) / links[v].length : place[v],
      ]),
    );
    layer.sort((a, b) => wanted.get(a) - wanted.get(b));
    note(layer);
  };
  for (let round = 0; round < 4; round += 1) {
    for (const layer of layers) sweep(layer, above);
    if (round < 3) for (const layer of layers.toReversed()) sweep(layer, below);
  }
}

// The middle of each box: near the mean of what it is linked to, without overlap.
function across(layers, above, below, size) {
  const x = [];
  for (const layer of layers) {
    let at = 0;
    for (const v of layer) {
      x[v] = at + size(v).w / 2;
      at += size(v).w + GAP_X;
    }
    for (const v of layer) x[v] -= at / 2;
  }
  const settle = (layer, links) => {
    const wanted = layer.map((v) => {
      const near = links(v);
      return near.length ? near.reduce((sum, u) => sum + x[u], 0) / near.length : x[v];
    });
    apart(layer, wanted, size, x);
  };
  for (let round = 0; round < 3; round += 1) {
    for (const layer of layers) settle(layer, (v) => above[v]);
    for (const layer of layers.toReversed()) settle(layer, (v) => below[v]);
  }
  for (const layer of layers) settle(layer, (v) => [...above[v], ...below[v]]);
  return x;
}

// The places closest to those wanted in which neighbors keep their distance: pooled where they would overlap.
function apart(layer, wanted, size, x) {
  const offset = [0];
  for (let i = 1; i < layer.length; i += 1) {
    offset[i] = offset[i - 1] + (size(layer[i - 1]).w + size(layer[i]).w) / 2 + GAP_X;
  }
  const pools = [];
  layer.forEach((_, i) => {
    let pool = { sum: wanted[i] - offset[i], number: 1 };
    while (pools.length && pools.at(-1).sum / pools.at(-1).number > pool.sum / pool.number) {
      const last = pools.pop();
      pool = { sum: last.sum + pool.sum, number: last.number + pool.number };
    }
    pools.push(pool);
  });
  let i = 0;
  for (const { sum, number } of pools) {
    for (let n = 0; n < number; n += 1, i += 1) x[layer[i]] = sum / number + offset[i];
  }
}

// Columns of layers [from, to), as many as make the whole fit best into a picture of this aspect.
function breakUp(height, extents, aspect) {
  const total = height.reduce((sum, h) => sum + h + GAP_Y, -GAP_Y);
  const most = Math.floor(height.length / (total > 1600 ? 2 : 4)); // short columns are hard to follow
  let best = { columns: [[0, height.length]], size: Infinity };
  for (let number = 1; number <= Math.min(Math.max(most, 1), 40); number += 1) {
    const columns = cut(height, total / number);
    if (columns.length < number) continue;
    const [across, down] = outline(columns);
    const size = Math.max(across / aspect, down);
    if (size < best.size * 0.93) best = { columns, size };
  }
  return best.columns;

  function outline(columns) {
    let [across, down] = [-GUTTER, 0];
    for (const [from, to] of columns) {
      const part = extents.slice(from, to);
      across += GUTTER + Math.max(...part.map((e) => e.right)) - Math.min(...part.map((e) => e.left));
      down = Math.max(
        down,
        height.slice(from, to).reduce((sum, h) => sum + h + GAP_Y, -GAP_Y),
      );
    }
    return [across, down];
  }
}

// Layers in columns about `most` high.
function cut(height, most) {
  const columns = [];
  let [from, used] = [0, 0];
  height.forEach((h, r) => {
    if (r > from && used + h / 2 > most) {
      columns.push([from, r]);
      [from, used] = [r, 0];
    }
    used += h + GAP_Y;
  });
  columns.push([from, height.length]);
  return columns;
}
