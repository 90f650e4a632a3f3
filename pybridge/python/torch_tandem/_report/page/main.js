// Puts the page together.

const WORDS = { slow: "Slow", note: "Look at", good: "Good" };

function verdict({ verdict: text, findings }, graph) {
  const item = ({ severity, text: what, advice, line }) => {
    const find = () => graph.find(fileLine(line));
    const link = h("button", { class: "link", type: "button", onclick: find }, "Find it in the graph");
    const said = h("div", null, h("p", null, withCode(what)));
    const linked = line && graph?.has(line);
    if (advice || linked) {
      said.append(
        h("p", { class: "advice" }, withCode(advice), advice && linked ? " " : null, linked ? link : null),
      );
    }
    return h("li", null, h("span", { class: `mark ${severity}` }, WORDS[severity] ?? ""), said);
  };
  document.querySelector("#verdict h1").append(...withCode(text));
  document.querySelector(".findings").append(...findings.map(item));
}

function figures({ report: r, times: t, compared }) {
  const steps = r.steps_traced + r.steps_coexecuted;
  const since = t.settled ? "since iteration 11" : `of ${duration(t.elapsed)}`;
  const after = [10, 5].find((number) => r[`ops_after_${number}`]);
  const late = after ? percent(r[`ops_coexecuted_after_${after}`], r[`ops_after_${after}`]) : null;
  const diverged = times(r.divergences);
  const ways = [
    ["traced", r.steps_traced - r.steps_in_part - r.steps_unrecorded, true],
    ["traced in part", r.steps_in_part],
    ["not recorded", r.steps_unrecorded],
    ["co-executed", r.steps_coexecuted, true],
  ];
  const ran = ways.filter(([, number, always]) => number || always);
  const shown = [
    ...speed(t, compared),
    ["Iterations", count(steps), ran.map(([how, number]) => `${count(number)} ${how}`).join(", ")],
    [
      "Co-executed",
      percent(r.ops_coexecuted, r.ops_captured + r.ops_on_host),
      late ? `${late} of the captured ones after iteration ${after}` : `of ${count(r.ops_captured)} calls`,
    ],
    [
      "Operator calls",
      compact(r.ops_captured),
      r.ops_on_host
        ? `and about ${count(r.ops_on_host)} on host tensors`
        : r.ops_other_threads
          ? `${count(r.ops_other_threads)} from other threads`
          : "all from one thread",
    ],
    ["Python waited", percent(t.waiting, t.elapsed), `${duration(t.waiting)} ${since}`],
    [
      "Kernels ran",
      percent(t.busy, t.elapsed),
      `${duration(t.busy)} ${since}` + (t.inline ? `, ${percent(t.inline, t.busy)} on Python's thread` : ""),
    ],
    [
      "Divergences",
      count(diverged),
      diverged ? `at ${plural(r.divergences.length, "place")}` : "the graph always fit",
    ],
    ["Memory", bytes(r.memory_peak), "at most"],
  ];
  document
    .querySelector(".figures")
    .append(
      ...shown.map(([name, value, note]) =>
        h(
          "div",
          null,
          h("dt", null, name),
          h("dd", null, h("div", { class: "value" }, value), h("div", { class: "note" }, note)),
        ),
      ),
    );
}

// The speed beside eager's if it was measured, or else the time of an iteration.
function speed(times, compared) {
  if (compared) {
    const { ratio, tandem, eager, pairs } = compared;
    const note = `${duration(tandem)} an iteration, eager ${duration(eager)}: medians of ${pairs} blocks each`;
    return [["Beside eager", `${ratio.toFixed(2)} x`, note]];
  }
  const rate = `${compact(1e6 / times.step)} a second, mean; tandem compare measures eager's`;
  return times.step ? [["An iteration", duration(times.step), rate]] : [];
}

function compact(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} M` : count(value);
}

function colophon({ about, report }) {
  const notes = report.notes.map((note) => h("p", null, `Note: ${note}`));
  return h(
    "footer",
    null,
    notes,
    h("p", null, h("code", null, about.command), ` in ${about.directory}`),
    h(
      "p",
      null,
      `Tandem ${about.tandem}, PyTorch ${about.torch}, Python ${about.python}, executor ${report.executor}.`,
    ),
  );
}

function main() {
  document.querySelector(".about").textContent = `${data.about.title}, ${data.about.when}`;
  const graph = graphSection(data);
  verdict(data, graph);
  figures(data);
  const sections = [
    ["Verdict", document.getElementById("verdict")],
    ["Iterations", timelineSection(data)],
    ["Graphs", graph],
    ["Tables", tablesSection(data, graph)],
  ].filter(([, section]) => section);
  const body = document.querySelector("main");
  for (const [title, section] of sections) {
    if (!section.isConnected) body.append(section);
    document.querySelector("nav").append(h("a", { href: `#${section.id}` }, title));
  }
  body.after(colophon(data));
  for (const [, section] of sections) section.start?.();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

main();
