// Tables that sort and filter.

const MAX_ROWS = 100; // shown at first

// What the words at the top of columns mean.
const MEANINGS = {
  Audits: "Calls that ran in Python although a replay was possible, and were compared with it",
  "Co-executed": "Share of the calls that GraphRunner ran from the symbolic graph",
  Cost: "Time until co-execution went on",
  Graphs: "Recorded calls that are replayed, one for each way that calls take",
  Kernels: "Time in which Python's thread ran the kernels that the value needed",
  Moves: "Memory that the kernel reads and writes each time, at least",
  "Of copying": "Memory moved a second, as a share of what copying reaches on this machine",
  "Of multiplying": "Arithmetic a second, as a share of what multiplying matrices reaches on this machine",
  Ran: "Time in the kernel; operators that one kernel computes share its time",
  Replayed: "Calls whose operators were sent without running Python",
  Saved: "Time that Python would have taken for the replayed calls",
  Share: "Of the time of all kernels",
  Waited: "Time in which Python had nothing else to do",
  "What differed": "Property in which the operator differed from the one in the graph",
};

// A column is { title, value: row => number or text, show: row => text or element, number: bool, share: row => 0..1,
// note: row => text below, source: row => code below }.
function table({ title, sum, columns, rows, sort }) {
  let by = sort ?? 0;
  let down = true;
  let wanted = "";
  let all = false;
  const texts = rows.map((row) =>
    columns
      .map((c) => `${c.value(row)} ${c.note?.(row) ?? ""} ${c.source?.(row) ?? ""}`)
      .join(" ")
      .toLowerCase(),
  );
  const body = h("tbody");
  const more = h("button", { type: "button", onclick: () => ((all = true), fill()) });
  const tally = h("span", { class: "sum", "aria-live": "polite" });

  const heads = columns.map((column, number) => {
    const press = () => {
      down = by === number ? !down : Boolean(column.number);
      by = number;
      fill();
    };
    return h(
      "th",
      { scope: "col", class: column.number ? "number" : null },
      h("button", { type: "button", onclick: press, title: MEANINGS[column.title] }, column.title),
    );
  });

  function compare(a, b) {
    const [x, y] = [columns[by].value(a), columns[by].value(b)];
    const numbers = typeof x === "number" && typeof y === "number";
    const order = numbers ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return down ? -order : order;
  }

  function cell(column, row) {
    const content = [column.show?.(row) ?? String(column.value(row))];
    const [note, source] = [column.note?.(row), column.source?.(row)];
    if (note) content.push(h("span", { class: "note" }, note));
    if (source) content.push(h("span", { class: "source" }, source));
    if (column.share) {
      const width = Math.max(0, Math.min(column.share(row), 1)) * 100;
      content.push(h("span", { class: "share", style: { width: `${width.toFixed(1)}%` } }));
    }
    return h("td", { class: column.number ? "number" : "text" }, content);
  }

  function fill() {
    heads.forEach((head, number) => {
      if (number === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const found = rows.filter((_, number) => texts[number].includes(wanted)).sort(compare);
    const shown = all ? found : found.slice(0, MAX_ROWS);
    body.replaceChildren(
      ...shown.map((row) =>
        h(
          "tr",
          null,
          columns.map((column) => cell(column, row)),
        ),
      ),
    );
    more.hidden = shown.length === found.length;
    more.textContent = `Show all ${count(found.length)}`;
    tally.textContent = wanted ? `${count(found.length)} of ${count(rows.length)} rows` : (sum ?? "");
  }

  const filter = h("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": `Filter ${title.toLowerCase()}`,
    oninput: (event) => {
      wanted = event.target.value.trim().toLowerCase();
      fill();
    },
  });
  fill();
  return h(
    "div",
    { class: "table", id: title.toLowerCase() },
    h("div", { class: "bar" }, h("h3", null, title), tally, h("span", { class: "push" }, filter)),
    h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, heads)), body)),
    more,
  );
}

function times(rows) {
  return rows.reduce((sum, row) => sum + row.count, 0);
}

function tablesSection({ report }, graph) {
  const findInGraph = graph?.find;
  const section = h("section", { id: "tables", class: "tables" });
  const add = (title, rows, none, make) => {
    if (rows.length) section.append(table({ title, rows, ...make(rows) }));
    else if (none)
      section.append(h("h3", { id: title.toLowerCase() }, title), h("p", { class: "none" }, none));
  };
  const operator = (name) =>
    findInGraph
      ? h("button", { class: "link code", type: "button", onclick: () => findInGraph(name) }, name)
      : name;
  const place = (line) =>
    findInGraph && line
      ? h("button", { class: "link", type: "button", onclick: () => findInGraph(fileLine(line)) }, shortLine(line))
      : shortLine(line);
  const shown = (text, nodes) =>
    graph && nodes.length
      ? h("button", { class: "link", type: "button", onclick: () => graph.show(nodes) }, text)
      : text;
  // The source line of a row, with its text below.
  const LINE = {
    title: "Line",
    value: (row) => shortLine(row.line),
    show: (row) => place(row.line),
    source: (row) => sourceOf(row.line),
  };
  const op = { title: "Operator", value: (row) => row.op, show: (row) => operator(row.op) };
  const number = (title, value, show, share) => ({ title, value, show, share, number: true });
  const most = (rows, name) => Math.max(...rows.map((row) => row[name]), 1);
  const total = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0);

  add("Kernels", report.machine ? report.kernels : [], null, (rows) => {
    const worst = most(rows, "exec_us");
    const all = Math.max(total(rows, "exec_us"), 1);
    const rate = (row, name) => (row[name] / Math.max(row.exec_us, 1)) * 1e6;
    const achieved = (title, name, peak, show) =>
      number(
        title,
        (row) => rate(row, name) / peak,
        (row) => `${percent(rate(row, name), peak)} (${show(rate(row, name))}/s)`,
        (row) => rate(row, name) / peak,
      );
    const operations = (n) => `${(n / 1e9).toFixed(1)} GFLOP`;
    const { copy, matmul } = report.machine;
    return {
      sum:
        `${plural(rows.length, "kernel")}; this machine copies ${bytes(copy)}/s and multiplies matrices ` +
        `at ${operations(matmul)}/s`,
      sort: 3,
      columns: [
        {
          title: "Line",
          value: (row) => row.lines.map(shortLine).join(", "),
          show: (row) => h("span", null, row.lines.flatMap((line, i) => [i ? ", " : "", place(line)])),
          note: (row) => row.modules.join(", "),
          source: (row) => row.lines.map(sourceOf).filter(Boolean).join("; "),
        },
        {
          title: "Operators",
          value: (row) => row.ops.map(shortOp).join(", "),
          show: (row) => shown(row.ops.map(shortOp).join(", "), row.nodes),
        },
        number(
          "Runs",
          (row) => row.count,
          (row) => count(row.count),
        ),
        number(
          "Ran",
          (row) => row.exec_us,
          (row) => duration(row.exec_us),
          (row) => row.exec_us / worst,
        ),
        number(
          "Share",
          (row) => row.exec_us / all,
          (row) => percent(row.exec_us, all),
        ),
        number(
          "Moves",
          (row) => row.bytes / Math.max(row.count, 1),
          (row) => bytes(row.bytes / Math.max(row.count, 1)),
        ),
        achieved("Of copying", "bytes", copy, bytes),
        achieved("Of multiplying", "flops", matmul, operations),
      ],
    };
  });

  add("Functions", report.functions, null, (rows) => {
    const most_saved = most(rows, "saved_us");
    return {
      sum: `${count(total(rows, "replayed"))} calls without Python, which saved about ${duration(total(rows, "saved_us"))}`,
      sort: 5,
      columns: [
        { title: "Function", value: (row) => row.name, show: (row) => h("code", null, row.name) },
        number(
          "Replayed",
          (row) => row.replayed,
          (row) => count(row.replayed),
        ),
        number(
          "In Python",
          (row) => row.ran,
          (row) => count(row.ran),
        ),
        number(
          "Audits",
          (row) => row.audits,
          (row) => count(row.audits),
        ),
        number(
          "Graphs",
          (row) => row.graphs,
          (row) => count(row.graphs),
        ),
        number(
          "Saved",
          (row) => row.saved_us,
          (row) => duration(row.saved_us),
          (row) => row.saved_us / most_saved,
        ),
        { title: "Why not replayed", value: (row) => row.reason ?? "" },
      ],
    };
  });

  add("Fetches", report.fetches, "The program never waited for a value.", (rows) => {
    const worst = most(rows, "wait_us");
    const kernels = total(rows, "kernels_us");
    return {
      sum:
        `${count(times(rows))}, in which Python waited ${duration(total(rows, "wait_us"))}` +
        (kernels ? ` and ran kernels for ${duration(kernels)}` : ""),
      sort: 3,
      columns: [
        LINE,
        op,
        number(
          "Times",
          (row) => row.count,
          (row) => count(row.count),
        ),
        number(
          "Waited",
          (row) => row.wait_us,
          (row) => duration(row.wait_us),
          (row) => row.wait_us / worst,
        ),
        number(
          "Kernels",
          (row) => row.kernels_us,
          (row) => duration(row.kernels_us),
        ),
        number("Each", each, (row) => duration(each(row))),
      ],
    };
  });

  add("Divergences", report.divergences, "The program never left its graph.", (rows) => {
    const worst = most(rows, "cost_us");
    return {
      sum: `${count(times(rows))}, which cost ${duration(total(rows, "cost_us"))}`,
      sort: 6,
      columns: [
        LINE,
        op,
        { title: "What differed", value: (row) => row.what },
        {
          title: "Expected",
          value: (row) => row.expected,
          show: (row) => h("code", null, row.expected),
        },
        { title: "Got", value: (row) => row.got, show: (row) => h("code", null, row.got) },
        number(
          "Times",
          (row) => row.count,
          (row) => count(row.count),
        ),
        number(
          "Cost",
          (row) => row.cost_us,
          (row) => duration(row.cost_us),
          (row) => row.cost_us / worst,
        ),
        number(
          "Iterations",
          (row) => row.last,
          (row) => span(row.first, row.last),
        ),
      ],
    };
  });

  add("Operators", report.operators, null, (rows) => {
    const worst = most(rows, "exec_us");
    return {
      sum: `${plural(rows.length, "operator")}, ${count(times(rows))} calls`,
      sort: 3,
      columns: [
        { title: "Operator", value: (row) => row.name, show: (row) => operator(row.name) },
        number(
          "Calls",
          (row) => row.count,
          (row) => count(row.count),
        ),
        number(
          "Co-executed",
          (row) => row.coexecuted / Math.max(row.count, 1),
          (row) => percent(row.coexecuted, row.count),
        ),
        number(
          "Ran",
          (row) => row.exec_us,
          (row) => duration(row.exec_us),
          (row) => row.exec_us / worst,
        ),
        number(
          "Each",
          (row) => row.exec_us / Math.max(row.coexecuted, 1),
          (row) => duration(row.exec_us / Math.max(row.coexecuted, 1)),
        ),
      ],
    };
  });

  add("Feeds", report.feeds, null, (rows) => ({
    sum: `${count(times(rows))} values, ${bytes(total(rows, "bytes"))}`,
    sort: 4,
    columns: [
      LINE,
      op,
      { title: "What was fed", value: (row) => row.kind },
      number(
        "Times",
        (row) => row.count,
        (row) => count(row.count),
      ),
      number(
        "Size",
        (row) => row.bytes,
        (row) => bytes(row.bytes),
      ),
    ],
  }));
  return section;

  function each(row) {
    return (row.wait_us + row.kernels_us) / Math.max(row.count, 1);
  }

  function span(first, last) {
    return first === last ? count(first) : `${count(first)} to ${count(last)}`;
  }
}
