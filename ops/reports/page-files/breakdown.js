"use strict";
// Who owns the peak: a treemap and a flame graph, by module, by stack and by kind.

function tree(content, by) {
  const root = { name: "peak", size: 0, children: new Map(), kinds: new Map() };
  const add = (path, kind, size) => {
    let node = root;
    for (const name of [null, ...path]) {
      if (name !== null) {
        if (!node.children.has(name)) {
          node.children.set(name, { name, size: 0, children: new Map(), kinds: new Map(), parent: node });
        }
        node = node.children.get(name);
      }
      node.size += size;
      node.kinds.set(kind, (node.kinds.get(kind) || 0) + size);
    }
  };
  for (const owner of content.owners) {
    const [number, module, op, stack, size] = owner;
    if (!size) continue;
    const kind = content.kinds[number];
    const parts = module === null ? ["no module"] : content.strings[module] ? content.strings[module].split(".") : ["(model)"];
    const what = op === null ? words(kind) : `${content.strings[op].replace(/^aten::/, "")} (${words(kind)})`;
    const lines = stackLines(content, stack);
    if (by === "module") add([...parts, what], kind, size);
    else if (by === "stack") add([...(lines.length ? lines.slice().reverse() : ["no stack"]), what], kind, size);
    else add([words(kind), ...parts, what], kind, size);
  }
  content.rest.forEach(([size], number) => {
    if (size) add(["smaller owners"], content.kinds[number], size);
  });
  return root;
}

function sorted(node) {
  return [...node.children.values()].sort((a, b) => b.size - a.size);
}

// The kind that most of it is; where there is one kind only, a color by the name.
function colorOf(node, plain) {
  let found = null, most = -1;
  if (plain) {
    let hash = 7;
    for (const letter of node.name) hash = (hash * 31 + letter.charCodeAt(0)) % 9973;
    return PALETTE[hash % PALETTE.length];
  }
  for (const [kind, size] of node.kinds) {
    if (size > most) [found, most] = [kind, size];
  }
  return data.colors[found] || data.colors.temporaries;
}

// Bruls, Huizing and van Wijk, "Squarified treemaps" (2000): rows whose boxes are nearly square.
function squarified(nodes, x, y, width, height) {
  const placed = [];
  const total = nodes.reduce((sum, node) => sum + node.size, 0);
  if (!total || width <= 0 || height <= 0) return placed;
  const scale = (width * height) / total;
  let rest = nodes.map((node) => ({ node, area: node.size * scale }));
  const worst = (row, side) => {
    const sum = row.reduce((all, one) => all + one.area, 0);
    const areas = row.map((one) => one.area);
    return Math.max((side * side * Math.max(...areas)) / (sum * sum), (sum * sum) / (side * side * Math.min(...areas)));
  };
  while (rest.length) {
    const side = Math.min(width, height);
    const row = [rest[0]];
    let length = 1;
    while (length < rest.length && rest[length].area > 0 && worst([...row, rest[length]], side) <= worst(row, side)) {
      row.push(rest[length]);
      length += 1;
    }
    const sum = row.reduce((all, one) => all + one.area, 0);
    const thick = sum / side;
    let at = 0;
    for (const { node, area } of row) {
      const long = area / thick;
      if (width >= height) placed.push({ node, x, y: y + at, width: thick, height: long });
      else placed.push({ node, x: x + at, y, width: long, height: thick });
      at += long;
    }
    if (width >= height) {
      x += thick;
      width -= thick;
    } else {
      y += thick;
      height -= thick;
    }
    rest = rest.slice(length);
    if (width < 0.5 || height < 0.5) break;
  }
  return placed;
}

function breakdownSection(content) {
  const hasModules = content.owners.some(([, module]) => module !== null);
  const state = { view: "treemap", by: hasModules ? "module" : "stack", node: null };
  const boxes = el("div", { className: "boxes" });
  const crumbs = el("div", { className: "crumbs" });
  const root = {};

  function box(node, x, y, width, height, text) {
    const color = colorOf(node, root.tree.kinds.size < 2);
    const share = percent(node.size, root.tree.size);
    return el("button", {
      className: isPale(color) ? "pale" : "",
      // What is too small for a text is named for screen readers, and reached through its parent.
      "aria-label": `${node.name}, ${bytes(node.size)}`,
      tabIndex: text ? 0 : -1,
      style: { left: `${x}px`, top: `${y}px`, width: `${Math.max(1, width)}px`, height: `${Math.max(1, height)}px`, background: color },
      onclick: () => {
        if (node.children.size) {
          state.node = node;
          hideTip();
          draw();
        }
      },
      onpointermove: (event) => showTip(event, el("h3", null, node.name),
        el("div", null, `${bytes(node.size)}, ${share} of the peak`),
        el("table", null, ...[...node.kinds].sort((a, b) => b[1] - a[1]).map(([kind, size]) => el("tr", null,
          el("td", null, dot(data.colors[kind])), el("td", null, words(kind)), cell(bytes(size), "n")))),
        el("div", { className: "code" }, pathOf(node).slice(0, -1).map((one) => one.name).join(" › "))),
      onpointerleave: hideTip,
    }, text);
  }

  function pathOf(node) {
    const path = [];
    for (let at = node; at && at.parent; at = at.parent) path.unshift(at);
    return path;
  }

  function drawTreemap(width) {
    const height = width < 600 ? 420 : 460;
    const made = [];
    const place = (node, x, y, w, h, depth) => {
      for (const one of squarified(sorted(node), x, y, w, h)) {
        if (one.width < 2.5 || one.height < 2.5 || made.length > 1500) continue;
        let inner = one.node;
        const names = [inner.name];
        while (inner.children.size === 1 && sorted(inner)[0].children.size) {
          inner = sorted(inner)[0];
          names.push(inner.name);
        }
        const label = one.width > 34 && one.height > 15 ? names.join(state.by === "stack" ? " › " : ".") : "";
        const shown = box(inner, one.x, one.y, one.width, one.height, label && `${label}  ${bytes(inner.size)}`);
        made.push(shown);
        if (depth < 4 && inner.children.size > 1 && one.width > 30 && one.height > 40) {
          shown.className = "outer";
          shown.style.background = "";
          place(inner, one.x + 3, one.y + 19, one.width - 6, one.height - 22, depth + 1);
        }
      }
    };
    place(state.node, 0, 0, width, height, 0);
    boxes.style.height = `${height}px`;
    boxes.replaceChildren(...made);
  }

  function drawFlame(width) {
    const made = [];
    const ROW = 22;
    let deepest = 0;
    const place = (node, x, w, depth) => {
      deepest = Math.max(deepest, depth);
      made.push(box(node, x, depth * ROW, w, ROW, w > 30 ? `${node.name}  ${bytes(node.size)}` : ""));
      let at = x;
      for (const child of sorted(node)) {
        const share = (child.size / node.size) * w;
        if (share >= 1.5 && depth < 40 && made.length < 2500) place(child, at, share, depth + 1);
        at += share;
      }
    };
    place(state.node, 0, width, 0);
    boxes.style.height = `${(deepest + 1) * ROW}px`;
    boxes.replaceChildren(...made);
  }

  function draw() {
    const path = pathOf(state.node);
    const all = el("button", { onclick: () => { state.node = root.tree; draw(); } }, "peak");
    crumbs.replaceChildren(all, ...path.flatMap((node) => [" › ", el("button", { onclick: () => { state.node = node; draw(); } }, node.name)]),
      ` ${bytes(state.node.size)}, ${percent(state.node.size, root.tree.size)}`);
    const width = boxes.clientWidth;
    if (!width || !state.node.size) return;
    if (state.view === "treemap") drawTreemap(width);
    else drawFlame(width);
  }

  function build() {
    root.tree = tree(content, state.by);
    state.node = root.tree;
    draw();
  }

  let last = 0;
  new ResizeObserver(() => {
    if (boxes.clientWidth !== last) draw();
    last = boxes.clientWidth;
  }).observe(boxes);
  const bys = { module: "module", stack: "stack", kind: "kind" };
  if (!hasModules) delete bys.module;
  build();
  return el("section", null,
    el("div", { className: "head" }, el("h2", null, "Who owns the peak"),
      choice({ treemap: "treemap", flame: "flame graph" }, state.view, (view) => { state.view = view; draw(); }),
      choice(bys, state.by, (by) => { state.by = by; build(); })),
    crumbs, boxes);
}
