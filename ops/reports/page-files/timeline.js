"use strict";
// Memory over time: stacked areas, with what owns most at the moment under the pointer.

const PHASES = { forward: "#56B4E9", backward: "#E69F00", optimizer: "#009E73", other: "" };

function timelineSection(content) {
  const points = sums(content.points);
  const modes = { kind: "kind", module: "module", line: "line" };
  // They are not live on the device, and no layers.
  const lines = Object.entries(content.lines).map(([name, differences]) => (
    { name, values: sums(differences), isLine: true, dash: name === "on the host" ? [5, 3] : [] }));
  const tops = [];
  for (const top of content.top) tops.push(top === null ? tops[tops.length - 1] : top);
  const few = Object.keys(content.series.kind).length < 2;
  const hasModules = Object.keys(content.series.module).some((name) => name !== "no module");
  if (!hasModules) delete modes.module;
  const state = { mode: few ? "line" : "kind", from: 0, to: Math.max(1, content.events - 1), hidden: new Set(), at: null, drag: null };
  const whole = [state.from, state.to];
  let layers = [];

  function choose(mode) {
    state.mode = mode;
    for (const layer of layers) state.hidden.delete(layer);
    const named = Object.entries(content.series[mode]);
    layers = named.map(([name, differences], index) => {
      const color = mode === "kind" ? data.colors[name] : name === "others" || name === "unknown" ? GRAY : PALETTE[index % PALETTE.length];
      return { name: mode === "kind" ? words(name) : name, color, values: sums(differences) };
    });
    legend.replaceChildren(...[...layers, ...lines].map((layer) => el("button", {
      "aria-pressed": String(!state.hidden.has(layer)),
      title: layer.name,
      onclick: (event) => {
        const hide = !state.hidden.has(layer);
        if (hide) state.hidden.add(layer);
        else state.hidden.delete(layer);
        event.currentTarget.setAttribute("aria-pressed", String(!hide));
        canvas.redraw();
      },
    }, layer.isLine ? el("span", { className: layer.dash.length ? "dot stroke dashed" : "dot stroke" }) : dot(layer.color), el("span", null, layer.name))));
    canvas.redraw();
  }

  const LEFT = 66, RIGHT = 12, TOP = 22, BOTTOM = 36;
  const inner = (width) => width - LEFT - RIGHT;
  const toX = (event, width) => LEFT + ((event - state.from) / (state.to - state.from)) * inner(width);
  const toEvent = (x, width) => state.from + ((x - LEFT) / inner(width)) * (state.to - state.from);

  function pointAt(event) { // the last point that is not after it
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (points[middle] <= event) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function draw(context, width, height) {
    const shown = layers.filter((layer) => !state.hidden.has(layer));
    const drawn = lines.filter((line) => !state.hidden.has(line));
    const first = pointAt(state.from), last = Math.min(points.length - 1, pointAt(state.to) + 1);
    // Of the points in one pixel, the fullest is drawn: a peak must not fade.
    const chosen = [];
    let most = 1, full = -1, column = null;
    for (let at = first; at <= last; at += 1) {
      const sum = shown.reduce((all, layer) => all + layer.values[at], 0);
      const here = Math.floor(toX(points[at], width));
      if (here !== column) chosen.push(at);
      else if (sum > full) chosen[chosen.length - 1] = at;
      full = here === column ? Math.max(full, sum) : sum;
      column = here;
      most = Math.max(most, sum, ...drawn.map((line) => line.values[at]));
    }
    const xs = chosen.map((at) => Math.floor(toX(points[at], width)));
    const end = Math.ceil(toX(last === points.length - 1 ? content.events : points[last], width));
    const top = most * 1.06;
    const toY = (size) => TOP + (1 - size / top) * (height - TOP - BOTTOM);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = css("--faint");
    context.strokeStyle = css("--line");
    context.lineWidth = 1;
    context.textAlign = "right";
    for (const size of ticks(top, 5)) {
      const y = Math.round(toY(size)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - RIGHT, y);
      context.stroke();
      context.fillText(bytes(size), LEFT - 8, y);
    }
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, inner(width), height);
    context.clip();
    const steps = (heights) => { // a level until the next point
      chosen.forEach((at, place) => {
        if (place) context.lineTo(xs[place], toY(heights[place - 1]));
        context.lineTo(xs[place], toY(heights[place]));
      });
      context.lineTo(end, toY(heights[heights.length - 1]));
    };
    const base = new Float64Array(chosen.length);
    for (const layer of shown) {
      const upper = base.map((size, place) => size + layer.values[chosen[place]]);
      context.beginPath();
      steps(upper);
      context.lineTo(end, toY(base[base.length - 1]));
      for (let place = base.length - 1; place >= 0; place -= 1) {
        context.lineTo(xs[place], toY(base[place]));
        if (place) context.lineTo(xs[place], toY(base[place - 1]));
      }
      context.fillStyle = layer.color;
      context.fill();
      base.set(upper);
    }
    for (const line of drawn) {
      context.beginPath();
      steps(chosen.map((at) => line.values[at]));
      context.strokeStyle = css("--ink");
      context.lineWidth = 1.2;
      context.setLineDash(line.dash);
      context.stroke();
      context.setLineDash([]);
      context.lineWidth = 1;
    }
    drawPhases(context, width, height);
    const peak = toX(content.peak, width);
    context.fillStyle = css("--ink");
    context.textAlign = peak > width / 2 ? "right" : "left";
    context.fillText(`peak ${bytes(content.summary.peak_bytes)}`, peak + (peak > width / 2 ? -7 : 7), 9);
    context.strokeStyle = css("--ink");
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(Math.round(peak) + 0.5, 3);
    context.lineTo(Math.round(peak) + 0.5, height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    if (state.at !== null) {
      const x = Math.round(toX(points[state.at], width)) + 0.5;
      context.beginPath();
      context.moveTo(x, TOP - 4);
      context.lineTo(x, height - BOTTOM);
      context.stroke();
    }
    if (state.drag) {
      context.fillStyle = css("--hover");
      const [a, b] = state.drag;
      context.fillRect(Math.min(a, b), TOP, Math.abs(b - a), height - TOP - BOTTOM);
    }
    context.restore();
    context.fillStyle = css("--faint");
    for (let part = 0; part <= 4; part += 1) {
      context.textAlign = ["left", "center", "center", "center", "right"][part];
      const event = state.from + ((state.to - state.from) * part) / 4;
      context.fillText(count(event), toX(event, width), height - 9);
    }
    range.textContent = `events ${count(state.from)} to ${count(state.to)} of ${count(content.events)}`;
  }

  function drawPhases(context, width, height) {
    if (content.bands.every(([, , phase]) => phase === "other")) return;
    content.bands.forEach(([start, , phase], index) => {
      const next = content.bands[index + 1];
      const end = next ? next[0] : content.events;
      if (!PHASES[phase] || end < state.from || start > state.to) return;
      const a = Math.max(LEFT, toX(start, width)), b = Math.min(width - RIGHT, toX(end, width));
      context.fillStyle = PHASES[phase];
      context.fillRect(a, height - BOTTOM + 3, Math.max(0.5, b - a), 12);
      if (b - a > 60) {
        context.fillStyle = "#10151a";
        context.textAlign = "center";
        context.font = "10px system-ui, sans-serif";
        context.fillText(phase, (a + b) / 2, height - BOTTOM + 9.5);
        context.font = "11.5px system-ui, sans-serif";
      }
    });
  }

  function zoom(factor, center) {
    const middle = center === undefined ? (state.from + state.to) / 2 : center;
    const least = Math.min(8, whole[1]);
    const size = Math.max(least, Math.min(whole[1] - whole[0], (state.to - state.from) * factor));
    const share = (middle - state.from) / (state.to - state.from);
    move(middle - share * size, size);
  }

  function move(from, size) {
    state.from = Math.max(whole[0], Math.min(from, whole[1] - size));
    state.to = state.from + size;
    canvas.redraw();
  }

  function bandAt(event) {
    let found = [0, 0, "other"];
    for (const band of content.bands) if (band[0] <= event) found = band;
    return found;
  }

  function describe(event) {
    const at = state.at;
    const total = Object.values(content.series.kind).length
      ? layers.reduce((sum, layer) => sum + layer.values[at], 0) : 0;
    const [, step, phase] = bandAt(points[at]);
    const where = phase === "other" ? "" : `, ${phase} of step ${step}`;
    const rows = layers.filter((layer) => layer.values[at] > 0 && !state.hidden.has(layer));
    const table = el("table", null, ...rows.reverse().map((layer) => el("tr", null,
      el("td", null, dot(layer.color)), el("td", null, layer.name), cell(bytes(layer.values[at]), "n"))));
    table.append(...lines.map((line) => el("tr", null,
      el("td"), el("td", null, line.name), cell(bytes(line.values[at]), "n"))));
    const owners = (tops[at] || []).slice(0, 3).flatMap(([owner, size]) => {
      const lines = stackLines(content, content.owners[owner][3]).slice(0, 2);
      const name = ownerName(content, content.owners[owner]) || lines[0] || "unknown";
      return [
        el("div", null, `${bytes(size)}  ${name} (${words(content.kinds[content.owners[owner][0]])})`),
        ...lines.map((line) => el("div", { className: "code" }, line)),
      ];
    });
    showTip(event, el("h3", null, `${bytes(total)} at event ${count(points[at])}${where}`), table,
      el("h4", null, "largest owners"), ...owners);
  }

  const range = el("span", { className: "range" });
  const legend = el("div", { className: "legend" });
  const canvas = picture(340, draw, {
    tabIndex: 0,
    className: "timeline",
    "aria-label": "live bytes over events; plus and minus zoom, arrows move",
    onpointermove: (event) => {
      const width = canvas.clientWidth;
      const x = event.clientX - canvas.getBoundingClientRect().left;
      state.at = pointAt(Math.max(state.from, Math.min(state.to, toEvent(x, width))));
      if (state.drag) state.drag[1] = x;
      canvas.redraw();
      describe(event);
    },
    onpointerdown: (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return;
      const x = event.clientX - canvas.getBoundingClientRect().left;
      state.drag = [x, x];
      canvas.setPointerCapture(event.pointerId);
    },
    onpointerup: () => {
      if (!state.drag) return;
      const [a, b] = state.drag.map((x) => toEvent(x, canvas.clientWidth));
      const far = Math.abs(state.drag[1] - state.drag[0]) > 6;
      state.drag = null;
      const from = Math.max(whole[0], Math.min(a, b)), to = Math.min(whole[1], Math.max(a, b));
      if (far) move(from, Math.max(Math.min(8, whole[1]), to - from));
      else canvas.redraw();
    },
    onpointerleave: () => {
      state.at = null;
      hideTip();
      canvas.redraw();
    },
    ondblclick: () => move(whole[0], whole[1] - whole[0]),
    onwheel: (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const x = event.clientX - canvas.getBoundingClientRect().left;
      zoom(event.deltaY > 0 ? 1.25 : 0.8, toEvent(x, canvas.clientWidth));
    },
    onkeydown: (event) => {
      const size = state.to - state.from;
      if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0") move(whole[0], whole[1] - whole[0]);
      else if (event.key === "ArrowLeft") move(state.from - size / 5, size);
      else if (event.key === "ArrowRight") move(state.from + size / 5, size);
      else return;
      event.preventDefault();
    },
  });
  const section = el("section", null,
    el("div", { className: "head" }, el("h2", null, "Memory over time"),
      choice(modes, state.mode, choose), el("span", { className: "grow" }),
      el("button", { className: "tool", "aria-label": "zoom in", onclick: () => zoom(0.5) }, "+"),
      el("button", { className: "tool", "aria-label": "zoom out", onclick: () => zoom(2) }, "−"),
      el("button", { className: "tool", onclick: () => move(whole[0], whole[1] - whole[0]) }, "all")),
    el("div", { className: "frame" }, canvas), legend,
    el("p", null, range, points.length < content.events
      ? `. Each point is the fullest of ${(content.events / points.length).toFixed(content.events < 10 * points.length ? 1 : 0)} events.` : ".",
    content.lines.reserved ? " The line is what the allocator has reserved." : "",
    content.lines["on the host"] ? " The dashed line is what arenas of the host hold." : "", " Drag to zoom in, double-click for all."));
  choose(state.mode);
  return section;
}
