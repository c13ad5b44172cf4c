"use strict";
// A rehearsal: whether the program fits, what the device holds, and what ran out of memory.

function rehearsalPart(content) {
  const facts = content.summary;
  const verdict = { true: "it fits", false: "it does not fit", null: "unknown whether it fits" }[facts.fits];
  const held = facts.peak_reserved_bytes + facts.context_bytes;
  const known = Object.entries(facts.peak_by_kind);
  const live = known.reduce((sum, [, size]) => sum + size, 0);
  const parts = [...known.map(([kind, size]) => [kind === "unknown" ? "other tensors" : words(kind), size, data.colors[kind]]),
    ["rounding and fragmentation", Math.max(0, facts.peak_reserved_bytes - live), "var(--line)"],
    ["CUDA context, an estimate", facts.context_bytes, data.colors.buffers],
    ["left of the device", Math.max(0, facts.device_bytes - held), "var(--sheet)"]];
  const whole = parts.reduce((sum, [, size]) => sum + size, 0);
  const table = (title, heads, rows) => (rows.length === 0 ? null : el("section", null,
    el("div", { className: "head" }, el("h2", null, title)),
    el("div", { className: "scroll" }, el("table", null,
      el("thead", null, el("tr", null, ...heads.map(([name, kind]) => el("th", { className: kind }, name)))),
      el("tbody", null, ...rows.map((row) => el("tr", null, ...row.map((text, at) => cell(text, heads[at][1])))))))));
  const after = Object.entries(facts.after_step).map(([kind, size]) => `${words(kind)} ${bytes(size)}`).join(", ");
  const versions = Object.entries(content.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  return [
    el("div", { className: "tiles" },
      tile(verdict, `${facts.device} of ${bytes(facts.device_bytes)}`),
      tile(bytes(facts.peak_bytes), "peak of tensors"),
      tile(bytes(facts.peak_reserved_bytes), "reserved by torch, at most"),
      tile(bytes(facts.device_bytes - held), "left of the device"),
      tile(bytes(facts.host_peak_bytes), "the host's memory, at most"),
      tile(count(facts.steps), "steps of optimizers")),
    el("p", null, facts.program),
    el("section", null, el("div", { className: "head" }, el("h2", null, "The device at the peak")), stripe(parts, whole, "the device at the peak"),
      el("div", { className: "legend" }, ...parts.map(([name, size, color]) => entry(color, `${name} ${bytes(size)}`))),
      facts.steps ? el("p", null, `After the last step: ${after}.`) : null),
    table("Requests that were refused", [["asked for", "n"], ["beside tensors of", "n"], ["line", "line"]],
      content.refused.map((one) => [bytes(one.asked), bytes(one.allocated), one.line])),
    content.owners.length ? breakdownSection(content) : null,
    content.owners.length ? ownersSection(content) : null,
    table("Reads of values that were not computed, but made of zeros", [["times", "n"], ["line", "line"]],
      content.reads.map(([line, times]) => [count(times), line])),
    el("p", null, versions),
  ];
}
