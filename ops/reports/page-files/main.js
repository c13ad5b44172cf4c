"use strict";
// Puts the page together: a tab per part, numbers first.

// A row of colors, as wide as their bytes: [name, bytes, color].
function stripe(parts, whole, label) {
  return el("div", { className: "stripe", role: "img", "aria-label": label }, ...parts.map(([name, size, color]) => el("div", {
    style: { width: `${(100 * size) / Math.max(1, whole)}%`, background: color },
    onpointermove: (event) => showTip(event, el("h3", null, name), el("div", null, `${bytes(size)}, ${percent(size, whole)}`)),
    onpointerleave: hideTip,
  })));
}

function recordingPart(content) {
  const facts = content.summary;
  const total = facts.total_bytes;
  const where = facts.peak_phase === "other" ? `event ${count(facts.peak_event)}` : `${facts.peak_phase}, step ${facts.peak_step}`;
  const tiles = el("div", { className: "tiles" },
    total === undefined ? null : tile(bytes(total), `predicted on ${facts.device}`),
    tile(bytes(facts.peak_bytes), `peak of tensors, ${where}`),
    facts.host_peak_bytes ? tile(bytes(facts.host_peak_bytes), "at most on the host") : null,
    facts.segments ? tile(bytes(facts.segments.reserved_bytes), "reserved at the end") : null,
    tile(bytes(facts.end_bytes), "live at the end"),
    tile(count(facts.allocations), `allocations on ${facts.device}`));
  const share = Object.entries(content.plan ? content.plan.device_share : {});
  const parts = [...Object.entries(facts.peak_by_kind).map(([kind, size]) => [words(kind), size, data.colors[kind]]),
    ...share.map(([name, size]) => [name, size, data.colors.temporaries])];
  const whole = parts.reduce((sum, [, size]) => sum + size, 0);
  const options = content.plan ? Object.entries(content.plan.options).map(([name, value]) => `${name} ${value}`).join(", ") : "";
  return [
    tiles,
    options ? el("p", null, options) : null,
    el("section", null, el("div", { className: "head" }, el("h2", null, "The peak by kind")), stripe(parts, whole, "the peak by kind"),
      el("div", { className: "legend" }, ...parts.map(([name, size, color]) => entry(color, `${name} ${bytes(size)}`)))),
    timelineSection(content), breakdownSection(content), ownersSection(content),
    content.segments ? segmentsSection(content.segments) : null,
    ...content.notes.map((note) => el("p", null, note)),
  ];
}

function ladderPart(content) {
  const { rungs, first_peak_bytes: first, least_peak_bytes: least } = content.summary;
  return [el("div", { className: "tiles" }, tile(bytes(first), "peak of the first rung"), tile(bytes(least), "least peak"),
    tile(percent(least, first), "of the first"), tile(count(rungs.length), "rungs")), ladderSection(content)];
}

const PARTS = { recording: recordingPart, ladder: ladderPart, profile: profilePart, rehearsal: rehearsalPart };

function start() {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const paint = () => {
    root.dataset.theme = isDark() ? "dark" : "light";
    theme.textContent = isDark() ? "light" : "dark";
    redrawAll();
  };
  const theme = el("button", {
    className: "tool", id: "theme", "aria-label": "light or dark",
    onclick: () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      paint();
    },
  });
  const body = el("div", { id: "part" });
  const tabs = data.parts.map((part, index) => el("button", { role: "tab", onclick: () => show(index) }, part.title));
  const show = (index) => {
    tabs.forEach((tab, at) => tab.setAttribute("aria-selected", String(at === index)));
    hideTip();
    const { kind, content } = data.parts[index];
    body.replaceChildren();
    body.append(...PARTS[kind](content).filter((one) => one !== null));
  };
  document.querySelector("main").append(
    el("header", null, el("h1", null, data.title), theme),
    ...(tabs.length > 1 ? [el("nav", { role: "tablist" }, ...tabs)] : []), body,
    el("footer", null, `Headroom ${data.version}. 1 GiB is 2^30 bytes. This page needs no network.`));
  document.body.append(tip);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    delete root.dataset.theme;
    paint();
  });
  paint();
  show(0);
}

start();
