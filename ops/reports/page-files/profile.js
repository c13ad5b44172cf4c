"use strict";
// Profiles: where the time of a step goes, by phase, module and operation.

const STEP_COLORS = { data: "#CC79A7", forward: "#56B4E9", backward: "#E69F00", recompute: "#D55E00", optimizer: "#009E73", other: "#9AA3AE" };

function time(us) {
  if (us === undefined) return "";
  if (Math.abs(us) < 1000) return `${us.toFixed(0)} µs`;
  return us < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}

function decimal(value, unit) { // 1.23 G..., in powers of 1000
  if (value === undefined) return "";
  const letters = ["", "k", "M", "G", "T", "P", "E"];
  let power = 0;
  while (value >= 999.5 && power < letters.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${value.toFixed(power && value < 99.95 ? 1 : 0)} ${letters[power]}${unit}`;
}

function phaseBar(phases, whole) {
  return el("div", { className: "bar" }, ...Object.entries(phases).map(([phase, us]) => el("div", {
    style: { width: `${(100 * Math.max(0, us)) / Math.max(1e-9, whole)}%`, background: STEP_COLORS[phase] },
    onpointermove: (event) => showTip(event, el("h3", null, phase), el("div", null, `${time(us)}, ${percent(us, whole)}`)),
    onpointerleave: hideTip,
  })));
}

// A table that is searched and sorted; columns are {key, name, value(row), text(row)?}.
function searchTable(title, rows, columns, first) {
  const state = { by: first, down: true, shown: 40, search: "" };
  const body = el("tbody");
  const found = el("span", { className: "found" });
  const more = el("button", { onclick: () => { state.shown += 300; draw(); } }, "show more");
  function draw() {
    const wanted = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => wanted.every((word) => columns[0].value(row).toLowerCase().includes(word)));
    const value = columns[state.by].value;
    const rank = (row) => { const at = value(row); return at === undefined ? -Infinity : at; };
    kept.sort((a, b) => {
      const [x, y] = [rank(a), rank(b)];
      const order = typeof x === "string" ? x.localeCompare(y) : x === y ? 0 : x - y;
      return state.down ? -order : order;
    });
    found.textContent = `${count(kept.length)} of ${count(rows.length)}`;
    body.replaceChildren(...kept.slice(0, state.shown).map((row) => el("tr", null, ...columns.map((column, index) => cell(
      column.text ? column.text(row) : String(column.value(row) ?? ""), index ? "n" : "who")))));
    more.style.display = kept.length > state.shown ? "" : "none";
  }
  draw();
  const heads = columns.map((column, index) => el("th", { className: index ? "n" : "" }, el("button", {
    onclick: () => {
      state.down = state.by === index ? !state.down : index > 0;
      state.by = index;
      draw();
    },
  }, column.name)));
  return el("section", null,
    el("div", { className: "head" }, el("h2", null, title), el("input", {
      type: "search", placeholder: "search", "aria-label": `search ${title}`,
      oninput: (event) => { state.search = event.target.value; draw(); },
    }), found),
    el("div", { className: "scroll" }, el("table", null, el("thead", null, el("tr", null, ...heads)), body)), more);
}

function memoryLine(memory) {
  const points = memory.points;
  const canvas = picture(160, (context, width, height) => {
    if (points.length < 2) return;
    const most = Math.max(...points.map(([, size]) => size), 1) * 1.06;
    const [start, end] = [points[0][0], points[points.length - 1][0]];
    const x = (us) => 66 + ((us - start) / Math.max(1, end - start)) * (width - 78);
    const y = (size) => 8 + (1 - size / most) * (height - 30);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.strokeStyle = css("--line");
    context.fillStyle = css("--faint");
    for (const size of ticks(most, 3)) {
      context.textAlign = "right";
      context.fillText(bytes(size), 58, y(size));
      context.strokeRect(66, Math.round(y(size)) + 0.5, width - 78, 0);
    }
    context.textAlign = "left";
    context.fillText(time(start), 66, height - 9);
    context.textAlign = "right";
    context.fillText(time(end), width - 12, height - 9);
    context.beginPath();
    context.moveTo(x(start), y(0));
    points.forEach(([us, size], at) => {
      if (at) context.lineTo(x(us), y(points[at - 1][1]));
      context.lineTo(x(us), y(size));
    });
    context.lineTo(x(end), y(0));
    context.fillStyle = data.colors.parameters;
    context.fill();
  });
  return el("section", null, el("div", { className: "head" }, el("h2", null, `Memory on ${memory.device}, above the start`)),
    el("div", { className: "frame" }, canvas));
}

function profilePart(content) {
  const facts = content.summary;
  const steps = Math.max(1, facts.steps);
  const each = (us) => time(us === undefined ? undefined : us / steps);
  const rate = (share) => `${(100 * share).toFixed(1)} %`;
  const longest = Math.max(...content.steps.map((step) => step.wall_us || 0), 1);
  const total = (name) => (row) => row.total[name];
  const mine = (name) => (row) => row.self[name];
  const perStep = (name) => (row) => (row.total[name] === undefined ? "" : time(row.total[name] / steps));
  const size = (get) => (row) => { const found = get(row); return found === undefined ? "" : bytes(found); };
  const rows = [...content.modules, { name: "(outside of modules)", type: "", self: content.outside, total: content.outside }];
  return [
    el("div", { className: "tiles" },
      tile(each(facts.wall_us), `a step, of ${count(facts.steps)} on ${facts.device}`),
      facts.mfu === undefined ? null : tile(rate(facts.mfu), "model-FLOPs utilization"),
      facts.model_flops === undefined ? null : tile(decimal(facts.model_flops / steps, "FLOP"), "a step"),
      facts.loader_us === undefined ? null : tile(each(facts.loader_us), "a step waits for data"),
      facts.recompute_us === undefined ? null : tile(each(facts.recompute_us), "a step recomputes"),
      facts.device_us === undefined ? null : tile(each(facts.device_us), "of kernels a step")),
    el("section", null, el("div", { className: "head" }, el("h2", null, "Time of the steps, by phase")),
      el("div", { className: "scroll" }, el("table", { className: "steps" }, el("tbody", null,
        ...content.steps.slice(0, 60).map((step) => el("tr", null, cell(`step ${step.number}`, "kind"),
          el("td", { className: "bars" }, el("div", { style: { width: `${(100 * (step.wall_us || 0)) / longest}%` } }, phaseBar(step.phases_us, step.wall_us))),
          cell(time(step.wall_us), "n")))))),
      el("div", { className: "legend" }, ...Object.entries(facts.phases_us).map(([phase, us]) =>
        entry(STEP_COLORS[phase], `${phase} ${percent(us, facts.wall_us)}`)))),
    searchTable("Modules", rows, [
      { name: "module", value: (row) => row.name || "(model)", text: (row) => (row.type ? `${row.name || "(model)"}  ${row.type}` : row.name) },
      { name: "forward a step", value: total("forward_us"), text: perStep("forward_us") },
      { name: "backward", value: total("backward_us"), text: perStep("backward_us") },
      { name: "recomputed", value: total("recompute_us"), text: perStep("recompute_us") },
      { name: "own forward", value: mine("forward_us"), text: (row) => (row.self.forward_us === undefined ? "" : time(row.self.forward_us / steps)) },
      { name: "FLOP a step", value: total("model_flops"), text: (row) => (row.total.model_flops ? decimal(row.total.model_flops / steps, "") : "") },
      { name: "kept", value: total("kept_bytes"), text: size(total("kept_bytes")) },
      { name: "parameters", value: (row) => row.parameter_bytes, text: size((row) => row.parameter_bytes) },
      { name: "optimizer", value: (row) => row.optimizer_bytes, text: size((row) => row.optimizer_bytes) },
      { name: "peak", value: (row) => row.peak_bytes, text: size((row) => row.peak_bytes) },
    ], 1),
    searchTable("Operations", content.ops, [
      { name: "operation", value: (row) => row.name },
      { name: "calls", value: (row) => row.calls, text: (row) => count(row.calls || 0) },
      { name: "own time", value: (row) => row.self_us, text: (row) => time(row.self_us) },
      { name: "time", value: (row) => row.total_us, text: (row) => time(row.total_us) },
      { name: "kernels", value: (row) => row.device_us, text: (row) => time(row.device_us) },
      { name: "FLOP", value: (row) => row.model_flops, text: (row) => (row.model_flops ? decimal(row.model_flops, "") : "") },
      { name: "bytes", value: (row) => row.bytes, text: size((row) => row.bytes) },
      { name: "bytes/s", value: (row) => row.bytes_per_s, text: (row) => (row.bytes_per_s ? decimal(row.bytes_per_s, "B/s") : "") },
    ], 2),
    ...content.memory.map(memoryLine),
    ...content.notes.map((note) => el("p", null, note)),
  ];
}
