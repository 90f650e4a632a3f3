// The graphs as trees of boxes: loops, functions and blocks hold operators. Nothing here is drawn.
//
// Boxes are made of runs of a topological order, so that no edge between them ever leads back, however deep
// they are; only the edges of loops do.

const MAX_CHILDREN = 100; // of a box; more are parted into numbered ones
const MAX_BLOCKS = 200; // at once
const MANY_ALIKE = 6; // operators in a row that are a box

// Functions between a call and what is called: PyTorch's, and what decorators make. They would be boxes around
// each module that say nothing.
const PLUMBING = [
  /(^|\.)(_use_grad|decorate_context|_engine_run_backward)$/,
  /<locals>\.(.*wrapper|wrapped\w*|inner|_?fn|maybe_fallback|forward_with_checkpointing)$/,
];

// The packed graph with its strings in place, and what each node leads to.
function unpack(packed) {
  const { strings, stacks } = packed;
  const frames = stacks.map((stack) =>
    stack
      .map((number) => parseFrame(strings[number]))
      .filter(({ name }) => !PLUMBING.some((pattern) => pattern.test(name))),
  );
  const nodes = packed.nodes.map(([id, op, line, stack, flags, variants, out, inputs, ran, module]) => ({
    id,
    op: strings[op],
    line: strings[line],
    frames: frames[stack],
    backward: Boolean(flags & 1),
    fetched: Boolean(flags & 2),
    ends: Boolean(flags & 4),
    dynamic: Boolean(flags & 8),
    variants,
    out: out.map((number) => strings[number]),
    inputs,
    ran,
    module: strings[module],
    before: [],
    after: [],
    users: [],
    loops: [],
  }));
  const byId = new Map(nodes.map((node) => [node.id, node]));
  for (const [from, to] of packed.edges) {
    const [a, b] = [byId.get(from), byId.get(to)];
    if (!a || !b) continue;
    a.after.push(b);
    b.before.push(a);
  }
  for (const node of nodes) {
    const sources = new Set(node.inputs.flat().map((id) => byId.get(id)));
    node.sources = [...sources].filter((source) => source);
    for (const source of node.sources) source.users.push(node);
  }
  const loops = new Map(packed.loops.map((loop) => [loop.id, loop]));
  const depth = (loop) =>
    loops.has(loop.parent) && loop.parent !== loop.id ? 1 + depth(loops.get(loop.parent)) : 0;
  for (const loop of [...packed.loops].sort((a, b) => depth(a) - depth(b))) {
    const within = loop.nodes.map((id) => byId.get(id)).filter((node) => node);
    for (const node of within) node.loops.push(loop);
    loop.depth = commonFrames(within);
  }
  const ran = nodes.reduce((sum, node) => sum + node.ran, 0);
  const longest = nodes.reduce((most, node) => Math.max(most, node.ran), 0);
  for (const node of nodes) {
    node.share = node.ran / Math.max(ran, 1); // of the time of all kernels
    node.heat = node.ran / Math.max(longest, 1); // beside the node that takes most time
  }
  return { nodes, byId, loops, blocks: packed.blocks, entry: packed.entry };
}

// `Sequential.forward:12`: a function, and the line that it is at.
function parseFrame(text) {
  const match = /^(.*?):(\d+)(?: (.*))?$/.exec(text);
  return match ? { name: match[1], at: match[2], file: match[3] ?? "" } : { name: text, at: "", file: "" };
}

// A topological order (but for loops' edges back) in which branches and loops stay together: reverse postorder.
// `follow(x)` and `loopsOf(x)` tell what comes after an item and the loops around it.
function ordered(items, follow, loopsOf, precede) {
  const done = new Set();
  const order = [];
  const next = (item) => {
    const shared = (other) => loopsOf(other).filter((loop) => loopsOf(item).includes(loop)).length;
    const found = follow(item);
    // What is visited first comes last: first what leaves the loop, then the later branches.
    return found.length < 2 ? found : found.toReversed().sort((a, b) => shared(a) - shared(b));
  };
  const visit = (root) => {
    if (done.has(root)) return;
    done.add(root);
    const path = [[root, next(root), 0]];
    while (path.length) {
      const top = path.at(-1);
      if (top[2] < top[1].length) {
        const item = top[1][top[2]++];
        if (done.has(item)) continue;
        done.add(item);
        path.push([item, next(item), 0]);
      } else {
        order.push(top[0]);
        path.pop();
      }
    }
  };
  const roots = items.filter((item) => !precede(item).length);
  for (const root of roots.toReversed()) visit(root);
  for (const item of items.toReversed()) visit(item);
  return order.reverse();
}

let boxes = 0;

// A box: a node, or what holds others. `index` is its place in the order.
function box(kind, properties) {
  return { number: boxes++, kind, children: null, open: false, parent: null, ...properties };
}

function adopt(parent, children) {
  parent.children = children;
  for (const child of children) child.parent = parent;
  return parent;
}

function finish(root, links) {
  const all = [];
  const boxesOf = new Map();
  const tally = (item) => {
    if (item.node) boxesOf.set(item.node, (boxesOf.get(item.node) ?? 0) + 1);
    item.children?.forEach(tally);
  };
  tally(root);
  const walk = (item, depth) => {
    item.depth = depth;
    all.push(item);
    item.leaves = item.node ? 1 : 0;
    // A node of a loop that is unrolled has several boxes.
    for (const name of ["ran", "share", "heat"])
      item[name] = item.node ? item.node[name] / boxesOf.get(item.node) : 0;
    item.backward = item.node ? item.node.backward : item.kind !== "switch";
    for (const child of item.children ?? []) {
      walk(child, depth + 1);
      item.leaves += child.leaves;
      item.share += child.share;
      item.ran += child.ran;
      if (child.leaves) item.backward &&= child.backward;
    }
    if (!item.leaves) item.backward = false;
  };
  walk(root, 0);
  all.forEach((item, index) => (item.index = index)); // parents before children, children in order
  const boxOf = new Map(all.filter((item) => item.node).map((item) => [item.node, item]));
  return { root, all, boxOf, links };
}

// --- The TraceGraph -----------------------------------------------------------------------------------------

function traceTree(graph) {
  const order = ordered(
    graph.nodes,
    (node) => node.after,
    (node) => node.loops,
    (node) => node.before,
  );
  const root = adopt(box("root", { title: "TraceGraph" }), parted(grouped(order)));
  root.open = true;
  const tree = finish(root, []);
  for (const node of order) {
    for (const next of node.after) tree.links.push([tree.boxOf.get(node), tree.boxOf.get(next)]);
  }
  tree.data = dataLinks(graph.nodes, tree.boxOf);
  return tree;
}

function dataLinks(nodes, boxOf) {
  return nodes.flatMap((node) => node.sources.map((source) => [boxOf.get(source), boxOf.get(node)]));
}

// Boxes for a run of nodes: by their loops and functions.
function grouped(order) {
  const place = new Map(order.map((node, index) => [node, index]));
  const paths = order.map(path);
  trim(order, paths);
  return runs(0, order.length, 0);

  // The children for the nodes from `low` to `high`, whose paths agree up to `depth`.
  function runs(low, high, depth) {
    const found = [];
    let start = low;
    while (start < high) {
      const step = paths[start][depth];
      let end = start + 1;
      if (!step) {
        found.push(box("node", { node: order[start], context: "" }));
      } else {
        while (end < high && paths[end][depth]?.key === step.key && follows(end, start)) end += 1;
        found.push(holding(step, runs(start, end, depth + 1)));
      }
      start = end;
    }
    return alike(found);
  }

  // Whether the node continues the run from `start` on: parallel branches are boxes of their own.
  function follows(at, start) {
    const { before } = order[at];
    return !before.length || before.some((node) => place.get(node) >= start && place.get(node) < at);
  }
}

// What a node is in, outermost first: its functions, each called from a line, and loops between them.
function path(node) {
  const steps = [];
  const frames = node.frames;
  const loops = [...node.loops];
  for (let depth = 0; depth <= frames.length; depth += 1) {
    while (loops.length && (loops[0].depth <= depth || depth === frames.length)) {
      const loop = loops.shift();
      steps.push({ key: `loop ${loop.id}`, loop });
    }
    if (depth === frames.length) break;
    const caller = depth ? frames[depth - 1].at : "";
    const { name } = frames[depth];
    steps.push({ key: `${node.backward}|${name}|${caller}`, title: moduleName(name), caller });
  }
  return steps;
}

// A module's forward function by the class alone.
function moduleName(name) {
  return name.replace(/(\w)\.forward$/, "$1");
}

// How many functions, from the outermost on, all nodes are in.
function commonFrames(nodes) {
  if (!nodes.length) return 0;
  let common = nodes[0].frames.length;
  for (const { frames } of nodes) {
    let same = 0;
    while (same < common && same < frames.length && sameCall(frames, nodes[0].frames, same)) same += 1;
    common = same;
  }
  return common;
}

function sameCall(a, b, depth) {
  return a[depth].name === b[depth].name && (!depth || a[depth - 1].at === b[depth - 1].at);
}

// Takes away the functions that all nodes are in, and puts backward into a box of its own.
function trim(order, paths) {
  const forward = order.map((node, index) => [node, paths[index]]).filter(([node]) => !node.backward);
  const plain = (step) => step.key.replace(/^(true|false)\|/, "");
  const common = (list) => {
    if (!list.length) return 0;
    let same = list[0].length;
    for (const other of list) {
      let here = 0;
      while (here < same && other[here] && plain(other[here]) === plain(list[0][here])) here += 1;
      same = here;
    }
    return same;
  };
  const shared = common(paths);
  if (!forward.length) return;
  order.forEach((node, index) => {
    paths[index] = paths[index].slice(shared);
    if (node.backward) paths[index].unshift({ key: "backward", title: "backward" });
  });
}

// A box for one step of a path; boxes around a single thing are left out.
function holding(step, children) {
  if (children.length === 1) {
    const [only] = children;
    if (only.kind === "node" && !step.loop) {
      only.context = step.title;
      return only;
    }
    if (only.kind === "function" && !step.loop) {
      only.title = `${step.title} › ${only.title}`;
      return only;
    }
  }
  if (step.loop) {
    const outer = box("loop", { loop: step.loop, title: loopTitle(step.loop) });
    return adopt(
      outer,
      step.loop.unrolled ? (repeated("round", children) ?? parted(children)) : parted(children),
    );
  }
  const outer = box("function", { title: step.title, caller: step.caller });
  const calls = step.key === "backward" ? null : repeated(step.title, children, step.caller);
  if (calls) outer.title = `${step.title} × ${calls.length}`;
  return adopt(outer, parted(calls ?? children));
}

function loopTitle(loop) {
  return loop.unrolled ? "Loop, unrolled" : "While";
}

// Calls of one function in a row look like one; where its first operator comes again, the next call begins.
function repeated(title, children, caller) {
  const lines = (node) => node.frames.map((frame) => `${frame.name}:${frame.at}`).join();
  const sign = (item) => (item.node ? `${item.node.op}|${lines(item.node)}` : `${item.title}|${item.caller}`);
  const first = sign(children[0]);
  const starts = children.flatMap((child, index) => (sign(child) === first ? [index] : []));
  if (starts.length < 2 || children.length < 3 * starts.length) return null;
  return starts.map((start, number) =>
    adopt(
      box("function", { title: `${title} ${number + 1}`, caller }),
      parted(children.slice(start, starts[number + 1] ?? children.length)),
    ),
  );
}

// Many calls of one operator from one line, as optimizers make them, are a box.
function alike(children) {
  const same = (a, b) => a.node && b?.node && a.node.op === b.node.op && a.node.line === b.node.line;
  const found = [];
  for (let start = 0, end; start < children.length; start = end) {
    end = start + 1;
    while (same(children[start], children[end])) end += 1;
    const run = children.slice(start, end);
    if (run.length < MANY_ALIKE || run.length === children.length) found.push(...run);
    else found.push(adopt(box("part", { title: `${shortOp(run[0].node.op)} × ${run.length}` }), parted(run)));
  }
  return found;
}

// Too many children are parted into boxes of about as many as there are boxes, named by their numbers.
function parted(children) {
  if (children.length <= MAX_CHILDREN) return children;
  const each = Math.max(Math.ceil(Math.sqrt(children.length)), 25);
  const parts = [];
  for (let start = 0; start < children.length; start += each) {
    const part = children.slice(start, start + each);
    const from = part[0].from ?? start + 1;
    const to = part.at(-1).to ?? start + part.length;
    const op = part.every((child) => child.node?.op === part[0].node?.op) ? shortOp(part[0].node?.op) : "";
    parts.push(adopt(box("part", { title: `${op} ${count(from)} to ${count(to)}`.trim(), from, to }), part));
  }
  return parted(parts);
}

// --- The symbolic graph -------------------------------------------------------------------------------------

function symbolicTree(graph) {
  const blocks = new Map(graph.blocks.map((block) => [block.id, block]));
  const loopsOf = (block) => {
    const found = [];
    for (
      let loop = graph.loops.get(block.loop);
      loop && !found.includes(loop);
      loop = graph.loops.get(loop.parent)
    ) {
      found.push(loop);
    }
    return found;
  };
  const follow = (block) => block.next.map((id) => blocks.get(id)).filter((found) => found);
  const before = new Map(graph.blocks.map((block) => [block, []]));
  for (const block of graph.blocks) for (const next of follow(block)) before.get(next).push(block);
  const order = ordered(graph.blocks, follow, loopsOf, (block) => before.get(block));

  const shared = commonFrames(graph.nodes);
  const links = [];
  const boxOf = new Map();
  const loopBoxes = new Map();
  const root = box("root", { title: "Symbolic graph", open: true });
  const into = new Map([[root, []]]);
  const holder = (block) => {
    let at = root;
    for (const loop of loopsOf(block).toReversed()) {
      if (!loopBoxes.has(loop)) {
        const made = box("loop", { loop, title: loopTitle(loop), open: true });
        loopBoxes.set(loop, made);
        into.set(made, []);
        into.get(at).push(made);
      }
      at = loopBoxes.get(loop);
    }
    return into.get(at);
  };

  const start = box("start", { title: "iteration begins" });
  const end = box("end", { title: "iteration ends" });
  const choose = (from, targets, ends, place) => {
    const cases = [...targets.map((id) => blocks.get(id)).filter((found) => found), ...(ends ? [null] : [])];
    if (cases.length < 2) {
      for (const target of cases) links.push([from, target ?? end]);
      return;
    }
    const way = box("switch", { title: "Switch-Case", cases });
    place.push(way);
    links.push([from, way]);
    cases.forEach((target, number) => links.push([way, target ?? end, `${number}`]));
  };

  into.get(root).push(start);
  choose(start, graph.entry, false, into.get(root));
  for (const block of order) {
    const nodes = block.nodes.map((id) => graph.byId.get(id)).filter((found) => found);
    const made = box("block", { block, title: `block ${block.id}`, within: whereabouts(nodes, shared) });
    adopt(made, parted(straight(nodes, links)));
    boxOf.set(block, made);
    const place = holder(block);
    place.push(made);
    choose(made, block.next, block.ends, place);
  }
  into.get(root).push(end);
  for (const made of [...loopBoxes.values()].reverse()) adopt(made, into.get(made));
  adopt(root, partedBlocks(into.get(root), start, end));

  const target = (item) => boxOf.get(item) ?? item;
  const tree = finish(
    root,
    links.map(([from, to, title]) => [target(from), target(to), title]),
  );
  tree.data = dataLinks(
    graph.nodes.filter((node) => tree.boxOf.has(node)),
    tree.boxOf,
  ).filter(([from]) => from);
  return tree;
}

// The innermost function that a block's nodes are in, unless all nodes of the graph are.
function whereabouts(nodes, shared) {
  const depth = commonFrames(nodes);
  const name = depth > shared ? moduleName(nodes[0].frames[depth - 1].name) : "";
  return nodes.length && nodes.every((node) => node.backward)
    ? `backward ${name && `of ${name}`}`.trim()
    : name;
}

// The operators of a block, one behind the other.
function straight(nodes, links) {
  const children = nodes.map((node) => box("node", { node, context: node.frames.at(-1)?.name ?? "" }));
  for (let at = 1; at < children.length; at += 1) links.push([children[at - 1], children[at]]);
  return children;
}

// Very many blocks are parted, too, and named by the first and the last.
function partedBlocks(children, start, end) {
  if (children.length <= MAX_BLOCKS) return children;
  const parts = [];
  let part = [];
  for (const child of children) {
    if (child === start || child === end) continue;
    // A Switch-Case stays with its block.
    if (part.length >= MAX_CHILDREN / 2 && child.kind !== "switch") {
      parts.push(part);
      part = [];
    }
    part.push(child);
  }
  if (part.length) parts.push(part);
  const named = parts.map((held) => {
    const [from, to] = [firstBlock(held), firstBlock(held.toReversed())];
    return adopt(box("part", { title: `blocks ${from} to ${to}`, from, to }), held);
  });
  return [start, ...parted(named), end];
}

function firstBlock(items) {
  for (const item of items) {
    if (item.block) return item.block.id;
    const inner = item.children && item.kind === "loop" ? firstBlock(item.children) : null;
    if (inner !== null) return inner;
  }
  return null;
}
