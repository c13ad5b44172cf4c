"use strict";
// Tables: owners that can be searched and sorted, segments, and the bars of a ladder.

function ownersSection(content) {
  const total = content.summary.peak_bytes;
  const rows = content.owners.filter((owner) => owner[4] > 0).map(([kind, module, op, stack, size, number]) => {
    const lines = stackLines(content, stack);
    const who = ownerName(content, [kind, module, op]);
    const name = content.kinds[kind];
    return { kind: name, who, lines, size, number, text: [words(name), who, ...lines].join("\n").toLowerCase() };
  });
  const state = { sort: "size", down: true, shown: 40, search: "" };
  const body = el("tbody");
  const found = el("span", { className: "found" });
  const more = el("button", { onclick: () => { state.shown += 300; draw(); } }, "show more");

  function draw() {
    const wanted = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => wanted.every((word) => row.text.includes(word)));
    const key = (row) => (state.sort === "line" ? row.lines[0] || "" : row[state.sort]);
    kept.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = typeof x === "number" ? x - y : x.localeCompare(y);
      return (state.down ? -order : order) || b.size - a.size;
    });
    const sum = kept.reduce((all, row) => all + row.size, 0);
    found.textContent = `${count(kept.length)} of ${count(rows.length)} owners, ${bytes(sum)}`;
    body.replaceChildren(...kept.slice(0, state.shown).map((row) => {
      const line = cell(row.lines[0] || "", "line");
      return el("tr", {
        onclick: (event) => {
          const open = event.currentTarget.classList.toggle("open");
          line.textContent = open ? row.lines.join("\n") : row.lines[0] || "";
        },
      }, el("td", { className: "kind" }, dot(data.colors[row.kind]), ` ${words(row.kind)}`), cell(row.who, "who"), cell(bytes(row.size), "n"),
      cell(percent(row.size, total), "n wide"), cell(count(row.number), "n wide"), line);
    }));
    more.style.display = kept.length > state.shown ? "" : "none";
  }

  const head = (key, name, kind) => el("th", { className: kind || "" }, el("button", {
    onclick: () => {
      state.down = state.sort === key ? !state.down : key === "size" || key === "number";
      state.sort = key;
      draw();
    },
  }, name));
  const search = el("input", {
    type: "search", placeholder: "search kind, module, op, line", "aria-label": "search owners",
    oninput: (event) => { state.search = event.target.value; draw(); },
  });
  draw();
  const rest = content.rest.reduce((sum, [size]) => sum + size, 0);
  const smaller = content.rest.reduce((sum, [, number]) => sum + number, 0);
  return el("section", null,
    el("div", { className: "head" }, el("h2", null, "Owners at the peak"), search, found),
    el("div", { className: "scroll" }, el("table", { className: "owners" },
      el("thead", null, el("tr", null, head("kind", "kind"), head("who", "owner"), head("size", "bytes", "n"),
        head("size", "share", "n wide"), head("number", "count", "n wide"), head("line", "line"))), body)),
    more, rest ? el("p", null, `${count(smaller)} smaller allocations with ${bytes(rest)} are not listed.`) : null);
}

function segmentsSection(segments) {
  const facts = segments.summary;
  const most = Math.max(...segments.rows.map(([total]) => total), 1);
  const state = { shown: 40 };
  const ROW = 13;
  const colors = () => ["transparent", data.colors.parameters, data.colors.communication];
  const canvas = picture(ROW * Math.min(state.shown, segments.rows.length) + 4, (context, width) => {
    const used = colors();
    segments.rows.slice(0, state.shown).forEach(([total, , runs], row) => {
      const scale = width / most, y = row * ROW + 2;
      context.fillStyle = css("--line");
      context.fillRect(0, y, Math.max(2, total * scale), ROW - 3);
      for (const [offset, size, kind] of runs) {
        if (!kind) continue;
        context.fillStyle = used[kind];
        context.fillRect(offset * scale, y, Math.max(0.5, size * scale - (size * scale > 3 ? 0.6 : 0)), ROW - 3);
      }
    });
  }, {
    className: "segments",
    onpointermove: (event) => {
      const area = canvas.getBoundingClientRect();
      const row = segments.rows[Math.floor((event.clientY - area.top - 2) / ROW)];
      if (!row) return hideTip();
      const [total, expandable, runs] = row;
      const at = ((event.clientX - area.left) / area.width) * most;
      const run = runs.find(([offset, size]) => offset <= at && at < offset + size);
      const lines = run ? stackLines(segments, run[3]).slice(0, 4) : [];
      const state = run && ["free", "in use", "waiting for another stream"][run[2]];
      showTip(event, el("h3", null, `${expandable ? "expandable " : ""}segment of ${bytes(total)}`),
        el("div", null, run ? `${bytes(run[1])} ${state}` : ""),
        ...lines.map((line) => el("div", { className: "code" }, line)));
    },
    onpointerleave: hideTip,
  });
  const more = el("button", {
    onclick: () => {
      state.shown = segments.rows.length;
      canvas.style.height = `${ROW * segments.rows.length + 4}px`;
      more.remove();
    },
  }, `show ${count(segments.rows.length)} segments`);
  const share = percent(facts.free_bytes, facts.reserved_bytes);
  const verdict = facts.free_bytes * 5 < facts.reserved_bytes
    ? "Little is lost to fragmentation."
    : facts.expandable_segments
      ? "Much is held and not used, though segments grow: it was in use earlier. torch.cuda.empty_cache() gives it back."
      : "Much is held and not used: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow instead.";
  return el("section", null,
    el("div", { className: "head" }, el("h2", null, "Segments and fragmentation")),
    el("div", { className: "tiles" }, tile(bytes(facts.reserved_bytes), `reserved in ${count(facts.segments)} segments`),
      tile(bytes(facts.allocated_bytes), "in use"), tile(bytes(facts.rounding_bytes), "of it rounding"),
      tile(bytes(facts.free_bytes), `free, ${share}`), tile(bytes(facts.stuck_bytes), "free between blocks in use"),
      tile(bytes(facts.largest_free_block_bytes), "largest free block")),
    el("p", null, `At the end of the recording. ${verdict}`), canvas,
    segments.rows.length > state.shown ? more : null,
    el("div", { className: "legend" }, entry(data.colors.parameters, "in use"),
      entry(data.colors.communication, "waiting for another stream"),
      entry(css("--line"), "free")));
}

function ladderSection(content) {
  const rungs = content.summary.rungs;
  const total = (rung) => Object.values(rung.bytes).reduce((sum, size) => sum + size, 0);
  const most = Math.max(...rungs.flatMap((rung) => [rung.peak_bytes, rung.predicted_peak_bytes || 0, total(rung)]), 1);
  const predicted = rungs.some((rung) => rung.predicted_peak_bytes !== undefined);
  const numbers = [["step_seconds", "seconds of a step", 3], ["bytes_per_parameter", "bytes per parameter", 1],
    ["held_out_bits_per_byte", "held-out bits/byte", 4], ["tokens_per_second", "tokens/s", 0]]
    .filter(([name]) => rungs.some((rung) => rung[name] !== undefined));
  const width = (size) => `${(100 * size) / most}%`;
  const rows = rungs.map((rung) => {
    const bar = el("div", { className: "bar" }, ...Object.entries(rung.bytes).map(([kind, size]) => el("div", {
      style: { width: width(size), background: content.colors[kind] },
    })), el("i", { style: { left: width(rung.peak_bytes) } }));
    if (rung.predicted_peak_bytes !== undefined) {
      bar.append(el("i", { className: "predicted", style: { left: width(rung.predicted_peak_bytes) } }));
    }
    const kinds = () => Object.entries(rung.bytes).map(([kind, size]) => el("tr", null,
      el("td", null, dot(content.colors[kind])), el("td", null, kind), cell(bytes(size), "n")));
    const number = (name, digits) => cell(rung[name] === undefined ? "" : rung[name].toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }), "n");
    return el("tr", {
      onpointermove: (event) => showTip(event, el("h3", null, rung.title), el("table", null, ...kinds(),
        el("tr", null, el("td"), el("td", null, content.summary.peak), cell(bytes(rung.peak_bytes), "n")))),
      onpointerleave: hideTip,
    }, cell(rung.title, "who"), el("td", { className: "bars" }, bar), cell(bytes(rung.peak_bytes), "n"),
    cell(percent(rung.peak_bytes, rung.first_peak_bytes), "n"),
    predicted ? cell(rung.predicted_peak_bytes === undefined ? "" : bytes(rung.predicted_peak_bytes), "n") : null,
    ...numbers.map(([name, , digits]) => number(name, digits)));
  });
  const names = ["rung", "memory in a step", content.summary.peak, "of the first", ...(predicted ? ["predicted"] : []), ...numbers.map(([, name]) => name)];
  return el("section", null,
    el("div", { className: "head" }, el("h2", null, "Memory of each rung, by kind")),
    el("div", { className: "scroll" }, el("table", { className: "ladder" },
      el("thead", null, el("tr", null, ...names.map((name, index) => el("th", { className: index > 1 ? "n" : "" }, name)))),
      el("tbody", null, ...rows))),
    el("div", { className: "legend" }, ...Object.entries(content.colors).map(([kind, color]) => entry(color, kind))),
    el("p", null, "Bars are counted bytes; the upright mark is the ", content.summary.peak, " of the process",
      predicted ? ", the dashed one what the plan predicted." : "."));
}
