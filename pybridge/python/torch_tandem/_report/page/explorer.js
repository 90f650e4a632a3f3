// The section with both graphs: search, the picture and what is known of the selected box.

const MAX_HITS = 200; // listed

function graphSection({ graph: packed }) {
  if (!packed.nodes.length) return null;
  const graph = unpack(packed);
  const trees = new Map();
  const makers = { trace: traceTree, symbolic: symbolicTree };
  let current = "trace";
  let drawn = "order"; // the arrows of the TraceGraph
  let hits = [];
  let hit = -1;

  const canvas = h("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label":
      "Graph. Arrows follow edges and boxes, Enter opens and closes, plus and minus zoom, 0 shows all.",
  });
  const stage = h("div", { class: "stage" }, canvas);
  const tip = new Tip(stage);
  const details = h("div", { class: "details", "aria-live": "polite" });
  const picture = new Picture(canvas, {
    tip,
    selected: (item) => details.replaceChildren(...described(item)),
  });

  // --- Search ---

  const field = h("input", {
    type: "search",
    placeholder: "Search operator, line, module or function",
    "aria-label": "Search the graph by operator, line, module or function",
    oninput: () => search(field.value),
    onkeydown: (event) => {
      if (event.key === "Enter") go(hit + (event.shiftKey ? -1 : 1));
      else if (event.key === "Escape") search((field.value = ""));
    },
  });
  const tally = h("span", { class: "tally", role: "status" });
  const stepper = (title, text, by) =>
    h("button", { type: "button", title, "aria-label": title, onclick: () => go(hit + by) }, text);
  const steppers = h(
    "span",
    { class: "buttons push", hidden: true },
    stepper("Previous", "↑", -1),
    stepper("Next", "↓", 1),
  );
  const list = h("ol", { class: "hits" });

  function search(text) {
    const wanted = text.trim().toLowerCase();
    const matches = (node) =>
      [node.op, node.line, node.module, ...node.frames.map((frame) => frame.name)].some((part) =>
        holds(part.toLowerCase(), wanted),
      );
    present(wanted ? graph.nodes.filter(matches) : []);
    tally.textContent = wanted ? plural(hits.length, "operator") : "";
    remember();
  }

  // Lists nodes, and rings them in the picture.
  function present(nodes) {
    hit = -1;
    const { boxOf } = trees.get(current);
    hits = nodes.filter((node) => boxOf.has(node));
    hits.sort((a, b) => boxOf.get(a).index - boxOf.get(b).index);
    picture.setHits(hits);
    steppers.hidden = !hits.length;
    list.replaceChildren(
      ...hits
        .slice(0, MAX_HITS)
        .map((node, number) =>
          h(
            "li",
            null,
            h(
              "button",
              { type: "button", "data-node": node.id, onclick: () => go(number) },
              node.op,
              h("small", null, `#${node.id} · ${shortLine(node.line)}`),
            ),
          ),
        ),
      ...(hits.length > MAX_HITS
        ? [h("li", { class: "more" }, `and ${count(hits.length - MAX_HITS)} more`)]
        : []),
    );
  }

  // Whether a text holds another; `a.py:3` is not held by `a.py:31`.
  function holds(text, wanted) {
    const end = text.indexOf(wanted) + wanted.length;
    return text.includes(wanted) && !(/:\d+$/.test(wanted) && /\d/.test(text[end] ?? ""));
  }

  function go(number) {
    if (!hits.length) return;
    hit = (number + hits.length) % hits.length;
    [...list.querySelectorAll("button")].forEach((button, at) => {
      if (at === hit) {
        button.setAttribute("aria-current", "true");
        button.scrollIntoView({ block: "nearest" });
      } else button.removeAttribute("aria-current");
    });
    tally.textContent = `${count(hit + 1)} of ${plural(hits.length, "operator")}`;
    picture.reveal(trees.get(current).boxOf.get(hits[hit]));
  }

  // --- What is selected ---

  function described(item) {
    if (!item) {
      return [
        h(
          "p",
          { class: "quiet" },
          "Click a box to open it, an operator to see where its inputs come from and its outputs go.",
        ),
      ];
    }
    if (item.node) return describedNode(item);
    if (item.kind === "switch") {
      return [
        h("h3", null, "Switch-Case"),
        h(
          "p",
          { class: "quiet" },
          "Python says which block comes next: iterations went different ways here.",
        ),
        h(
          "ul",
          null,
          item.cases.map((block, number) =>
            h("li", null, `case ${number}: `, block ? blockLink(block) : "the iteration ends"),
          ),
        ),
      ];
    }
    return describedBox(item);
  }

  function describedNode(item) {
    const { node, context } = item;
    const source = sourceOf(node.line);
    const links = (nodes) =>
      h(
        "ul",
        null,
        nodes.slice(0, 12).map((other) => h("li", null, nodeLink(other))),
        more(nodes, 12),
      );
    const inputs = node.inputs.map((sources) =>
      h(
        "li",
        null,
        sources.flatMap((id, number) => [number ? " or " : null, inputLink(id)]),
      ),
    );
    return [
      h("h3", null, node.op),
      h(
        "p",
        { class: "quiet" },
        `#${node.id}${node.backward ? ", in backward" : ""}${context ? `, in ${context}` : ""}`,
      ),
      source ? h("pre", null, source) : null,
      facts([
        ["line", shortLine(node.line)],
        ["module", node.module],
        ["makes", node.out.join(", ")],
        ["ran", ranWords(item)],
        ["shapes seen", count(node.variants)],
        ["fetched", node.fetched ? "the program waits for its value" : null],
        ["dynamic", node.dynamic ? "its outputs' shapes depend on data" : null],
        ["ends", node.ends ? "an iteration may end behind it" : null],
      ]),
      inputs.length ? h("h4", null, "Inputs") : null,
      inputs.length ? h("ol", { start: 0 }, inputs) : null,
      node.users.length ? h("h4", null, "Used by") : null,
      node.users.length ? links(node.users) : null,
      h("h4", null, "Called from"),
      h(
        "ol",
        null,
        node.frames.map((frame) =>
          h("li", { class: "code" }, frame.at ? `${frame.file}:${frame.at} in ${frame.name}` : frame.name),
        ),
      ),
    ].filter((part) => part);
  }

  function describedBox(item) {
    const nodes = leavesOf(item);
    const kinds = new Map();
    for (const node of nodes) kinds.set(node.op, (kinds.get(node.op) ?? 0) + 1);
    const common = [...kinds].sort((a, b) => b[1] - a[1]);
    const loop = item.loop;
    return [
      h("h3", null, item.title),
      facts([
        ["operators", count(item.leaves)],
        ["ran", ranWords(item)],
        [
          "in backward",
          nodes.some((node) => node.backward) ? count(nodes.filter((node) => node.backward).length) : null,
        ],
        [
          "fetched",
          nodes.some((node) => node.fetched) ? count(nodes.filter((node) => node.fetched).length) : null,
        ],
        ["from", nodes.length ? shortLine(nodes[0].line) : null],
        ["called at", item.caller ? `line ${item.caller}` : null],
        [
          "loop",
          loop
            ? loop.unrolled
              ? "each round has operators of its own"
              : "all rounds share these operators"
            : null,
        ],
        ["block", item.kind === "block" && item.block.ends ? "an iteration may end behind it" : null],
      ]),
      common.length ? h("h4", null, "Operators") : null,
      common.length
        ? h(
            "ul",
            null,
            common.slice(0, 12).map(([op, times]) => h("li", null, `${times} × `, searchLink(op))),
            more(common, 12),
          )
        : null,
      item.block?.next.length ? h("h4", null, "Followed by") : null,
      item.block?.next.length
        ? h(
            "ul",
            null,
            item.block.next
              .map((id) => graph.blocks.find((block) => block.id === id))
              .filter((b) => b)
              .map((b) => h("li", null, blockLink(b))),
          )
        : null,
    ].filter((part) => part);
  }

  function leavesOf(item) {
    return item.node ? [item.node] : (item.children ?? []).flatMap(leavesOf);
  }

  function more(all, shown) {
    return all.length > shown ? h("li", { class: "quiet" }, `and ${count(all.length - shown)} more`) : null;
  }

  function link(text, action) {
    return h("button", { class: "link", type: "button", onclick: action }, text);
  }

  function nodeLink(node) {
    const target = trees.get(current).boxOf.get(node);
    const text = `${shortOp(node.op)} #${node.id}`;
    return target ? link(text, () => picture.reveal(target)) : text;
  }

  function inputLink(id) {
    if (id === "state") return "state, such as a parameter";
    if (id === "feed") return "fed by the program";
    const node = graph.byId.get(id);
    return node ? nodeLink(node) : `#${id}`;
  }

  function blockLink(block) {
    return link(`block ${block.id}`, () =>
      picture.reveal(trees.get(current).all.find((item) => item.block === block)),
    );
  }

  function searchLink(op) {
    return link(op, () => find(op));
  }

  // --- Controls ---

  const views = choice(
    "Graph",
    [["trace", "TraceGraph"], ...(graph.blocks.length ? [["symbolic", "Symbolic graph"]] : [])],
    (name) => {
      open(name);
      remember();
    },
  );
  const arrows = choice(
    "Arrows",
    [
      ["order", "Order"],
      ["data", "Data"],
    ],
    (links) => {
      picture.setLinks((drawn = links));
      remember();
    },
  );
  const button = (title, text, action) =>
    h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
  const zooming = h(
    "div",
    { class: "zooming" },
    button("Zoom in", icon("M8 3v10M3 8h10"), () => picture.zoom(1.3)),
    button("Zoom out", icon("M3 8h10"), () => picture.zoom(1 / 1.3)),
    button("Show all", icon("M2.5 4.5h11v7h-11zM5.5 7h5v2h-5z"), () => picture.fit()),
    button(
      "Fill the window",
      icon("M2.5 6v-3.5h3.5M10 2.5h3.5v3.5M13.5 10v3.5h-3.5M6 13.5h-3.5v-3.5"),
      () => {
        explorer.classList.toggle("full");
        picture.fit();
      },
    ),
  );
  const hint = h("p", { class: "hint" }, "Drag to move. Click, then use the wheel to zoom.");
  canvas.addEventListener("pointerdown", () => hint.remove(), { once: true });
  stage.append(zooming, hint);
  const explorer = h(
    "div",
    { class: "explorer" },
    stage,
    h(
      "div",
      { class: "side" },
      h("div", { class: "finder" }, field, h("div", { class: "row" }, tally, steppers)),
      list,
      details,
    ),
  );
  explorer.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && explorer.classList.contains("full")) {
      explorer.classList.remove("full");
      picture.fit();
    }
  });
  const lead = h("p", { class: "lead" });
  const legends = h("div");
  const keys = {
    trace: [
      ["forward", "--forward"],
      ["backward", "--backward"],
      ["function", "--strong-line", "outline"],
      ["loop", "--loop", "dashed"],
      ["time of its kernels", "--heat"],
      ["search hit", "--hit", "outline"],
      ["selected: inputs from", "--python-stall"],
      ["selected: outputs to", "--graph"],
    ],
    symbolic: [
      ["block", "--block", "outline"],
      ["Switch-Case", "--mixed", "diamond"],
      ["While", "--loop", "dashed"],
      ["forward", "--forward"],
      ["backward", "--backward"],
      ["time of its kernels", "--heat"],
      ["search hit", "--hit", "outline"],
      ["selected: inputs from", "--python-stall"],
      ["selected: outputs to", "--graph"],
    ],
  };
  const leads = {
    trace:
      "All traced iterations, merged: where they went different ways the graph branches, where they agreed again it " +
      "rejoins. Boxes are functions and loops.",
    symbolic:
      "What GraphRunner executes: blocks of operators, sent to it one at a time. Behind a Switch-Case, Python says " +
      "which block comes next.",
  };

  function open(name) {
    current = makers[name] ? name : "trace";
    if (!trees.has(current)) trees.set(current, makers[current](graph));
    views.set(current);
    arrows.hidden = current !== "trace";
    picture.links = current === "trace" ? drawn : "order";
    lead.textContent = leads[current];
    legends.replaceChildren(legend(keys[current]));
    picture.show(trees.get(current));
    details.replaceChildren(...described(null));
    if (field.value) search(field.value);
  }

  // --- Addresses: #graph=symbolic&search=conv&node=12&arrows=data&open=all ---

  function address() {
    const text = location.hash.slice(1);
    return new URLSearchParams(text.includes("=") ? text : "");
  }

  function remember() {
    const wanted = new URLSearchParams();
    if (current !== "trace") wanted.set("graph", current);
    if (field.value.trim()) wanted.set("search", field.value.trim());
    if (picture.links !== "order") wanted.set("arrows", picture.links);
    const text = wanted.toString();
    if (!text && !address().size) return;
    try {
      history.replaceState(null, "", text ? `#${text}` : `${location.pathname}${location.search}`);
    } catch {
      // Some browsers allow no other address for a file.
    }
  }

  function visit() {
    const wanted = address();
    if (wanted.has("graph") && wanted.get("graph") !== current) open(wanted.get("graph"));
    if (wanted.get("arrows") === "data" && current === "trace") {
      arrows.set((drawn = "data"));
      picture.setLinks(drawn);
    }
    if (wanted.get("open") === "all") picture.openAll();
    if (wanted.has("search")) search((field.value = wanted.get("search")));
    const node = graph.nodes.find(({ id }) => String(id) === wanted.get("node"));
    const item = node && trees.get(current).boxOf.get(node);
    if (item) picture.reveal(item);
    if (wanted.size) section.scrollIntoView({ behavior: "instant" });
  }

  // For the rest of the page: shows an operator's nodes, or a line's.
  function find(text) {
    search((field.value = text));
    section.scrollIntoView();
    go(0);
  }

  // For the rest of the page: shows nodes, given their ids.
  function show(ids) {
    field.value = "";
    present(ids.map((id) => graph.byId.get(id)).filter((node) => node));
    remember();
    section.scrollIntoView();
    go(0);
  }

  function has(line) {
    return graph.nodes.some((node) => node.line === line);
  }

  const loops = graph.loops.size;
  const section = h(
    "section",
    { id: "graph", class: "graphs" },
    h("h2", null, "Graphs"),
    lead,
    h(
      "div",
      { class: "bar" },
      views,
      arrows,
      h(
        "span",
        { class: "sum" },
        [
          plural(graph.nodes.length, "operator"),
          plural(graph.blocks.length, "block"),
          loops ? plural(loops, "loop") : null,
        ]
          .filter((x) => x)
          .join(", "),
      ),
      h(
        "span",
        { class: "buttons push" },
        button("Open all boxes", "Open all", () => picture.openAll()),
        button("Close all boxes", "Close all", () => picture.closeAll()),
      ),
    ),
    explorer,
    legends,
  );
  const start = () => {
    open("trace");
    picture.start();
    picture.fit();
    visit();
    addEventListener("hashchange", visit);
  };
  return Object.assign(section, { start, find, has, show });
}
