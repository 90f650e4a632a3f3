// A tree of boxes on a canvas, with zoom, pan, tooltips, a selection and the keyboard.

const MAX_SHOWN = 3000; // boxes, when all are opened at once
const FIRST_SHOWN = 45; // when the picture is shown first
const LEAST_SHARE = 0.005; // of the kernels' time, that is shown
const MARGIN = 12; // around all
const BUTTONS = 40; // on the right
const HINT = 22; // below

class Picture {
  constructor(canvas, { selected, tip }) {
    Object.assign(this, { canvas, selected, tip });
    this.tree = null;
    this.view = { k: 1, x: 0, y: 0 }; // screen = world * k + (x, y)
    this.selection = null;
    this.hovered = null;
    this.hits = new Set();
    this.links = "order";
    this.widths = new Map();
    this.redraw = () => {};
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.pressed = null));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  start() {
    this.redraw = keepDrawn(this.canvas, (pen, width, height, colors) =>
      this.draw(pen, width, height, colors),
    );
  }

  // --- What is shown ---

  show(tree) {
    this.tree = tree;
    this.selection = this.hovered = null;
    this.hits = new Set();
    const telling = (item) => item.kind !== "part" && !(item.backward && item.parent.backward);
    if (!tree.seen) openFirst(tree.root, FIRST_SHOWN, telling);
    tree.seen = true;
    this.layout();
    this.fit();
  }

  layout() {
    const { clientWidth, clientHeight } = this.canvas;
    const aspect = clientWidth && clientHeight ? clientWidth / clientHeight : 1.5;
    const links = this.links === "data" ? this.tree.data : this.tree.links;
    arrange(this.tree, links, {
      measure: (item, titleOnly) => this.measure(item, titleOnly),
      aspect: Math.min(Math.max(aspect, 0.8), 1.7),
      wide: this.links === "data",
    });
    const settle = (item, x, y) => {
      [item.left, item.top] = [x, y];
      if (item.open) for (const child of item.children) settle(child, x + child.x, y + child.y);
    };
    settle(this.tree.root, 0, 0);
    this.redraw();
  }

  // Lays out again with `item` staying where it is on the screen.
  around(item, change) {
    const before = [item.left, item.top];
    change();
    this.layout();
    this.view.x += (before[0] - item.left) * this.view.k;
    this.view.y += (before[1] - item.top) * this.view.k;
    this.redraw();
  }

  toggle(item) {
    if (!item.children?.length || item.kind === "root") return;
    this.around(item, () => (item.open = !item.open));
  }

  openAll() {
    openFirst(this.tree.root, MAX_SHOWN);
    this.layout();
    this.fit();
  }

  closeAll() {
    for (const item of this.tree.all) item.open = item.kind === "root" || item.kind === "loop";
    if (this.selection && !this.visible(this.selection)) this.select(null);
    this.layout();
    this.fit();
  }

  visible(item) {
    for (let at = item.parent; at; at = at.parent) if (!at.open) return false;
    return true;
  }

  // The box that stands for `item`: itself, or the outermost closed one around it.
  standIn(item) {
    let found = item;
    for (let at = item.parent; at; at = at.parent) if (!at.open) found = at;
    return found;
  }

  // Opens what is around `item`, selects it and brings it to the middle.
  reveal(item) {
    let opened = false;
    for (let at = item.parent; at; at = at.parent) {
      opened ||= !at.open;
      at.open = true;
    }
    if (opened) this.layout();
    this.select(item);
    const { clientWidth, clientHeight } = this.canvas;
    const k = Math.max(this.view.k, 0.8);
    this.view = {
      k,
      x: clientWidth / 2 - (item.left + item.w / 2) * k,
      y: clientHeight / 2 - (item.top + Math.min(item.h, clientHeight / k) / 2) * k,
    };
    this.redraw();
  }

  select(item) {
    this.selection = item;
    this.selected(item);
    this.redraw();
  }

  setHits(nodes) {
    this.hits = new Set(nodes.map((node) => this.tree.boxOf.get(node)));
    for (const item of this.tree.all) item.found = this.hits.has(item) ? 1 : 0;
    for (const item of this.tree.all.toReversed()) if (item.parent) item.parent.found += item.found;
    this.redraw();
  }

  setLinks(links) {
    this.links = links;
    this.layout();
    this.fit();
  }

  fit() {
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !this.tree) return;
    const { root } = this.tree;
    const [across, down] = [clientWidth - MARGIN - BUTTONS, clientHeight - 2 * MARGIN - HINT];
    const k = Math.min(across / root.w, down / root.h, 1.15);
    this.view = { k, x: MARGIN + (across - root.w * k) / 2, y: MARGIN + (down - root.h * k) / 2 };
    this.redraw();
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const k = Math.min(Math.max(this.view.k * factor, 0.01), 4);
    const ratio = k / this.view.k;
    this.view = { k, x: x - (x - this.view.x) * ratio, y: y - (y - this.view.y) * ratio };
    this.redraw();
  }

  pan(x, y) {
    this.view.x += x;
    this.view.y += y;
    this.redraw();
  }

  // --- Input ---

  wheel(event) {
    // Until it was clicked, the picture lets the page scroll.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (event.shiftKey) this.pan(-(event.deltaX || event.deltaY), 0);
    else this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.006 : 0.0016)), event.offsetX, event.offsetY);
  }

  press(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pressed = { x: event.offsetX, y: event.offsetY, moved: false };
  }

  move(event) {
    const { pressed } = this;
    if (!pressed) return this.hover(this.hit(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    const [dx, dy] = [event.offsetX - pressed.x, event.offsetY - pressed.y];
    if (!pressed.moved && Math.hypot(dx, dy) < 4) return undefined;
    pressed.moved = true;
    this.canvas.classList.add("dragging");
    this.tip.hide();
    this.pan(dx, dy);
    Object.assign(pressed, { x: event.offsetX, y: event.offsetY });
    return undefined;
  }

  release(event) {
    const { pressed } = this;
    this.pressed = null;
    this.canvas.classList.remove("dragging");
    if (!pressed || pressed.moved) return;
    const item = this.hit(event.offsetX, event.offsetY);
    if (!item || item.kind === "root") return this.select(null);
    this.select(item);
    // An open box closes by a click on its title. Clicks elsewhere in the box are for its contents.
    const inTitle = event.offsetY < item.top * this.view.k + this.view.y + Math.max(TITLE * this.view.k, 16);
    if (!item.open || inTitle) this.toggle(item);
    return undefined;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[
      event.key
    ];
    if (move && (event.shiftKey || !this.selection)) {
      this.pan(...move);
    } else if (move) {
      this.step(event.key);
    } else if (event.key === "Enter" || event.key === " ") {
      if (this.selection) this.toggle(this.selection);
      else this.reveal(this.tree.root.children[0]);
    } else if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  // Along the edges, up and down; into and out of boxes, right and left.
  step(key) {
    const at = this.selection;
    const { edges } = at.parent ?? {};
    const next = {
      ArrowDown: () => edges?.find((edge) => edge.from === at && !edge.back)?.to ?? this.sibling(at, 1),
      ArrowUp: () => edges?.find((edge) => edge.to === at && !edge.back)?.from ?? this.sibling(at, -1),
      ArrowRight: () => {
        if (at.children?.length && !at.open) this.toggle(at);
        return at.children?.[0];
      },
      ArrowLeft: () => (at.parent?.kind === "root" ? null : at.parent),
    }[key]();
    if (!next) return;
    this.select(next);
    this.keepInView(next);
  }

  sibling(item, by) {
    return item.parent?.children[item.parent.children.indexOf(item) + by];
  }

  keepInView(item) {
    const { k, x, y } = this.view;
    const { clientWidth, clientHeight } = this.canvas;
    const [left, top] = [item.left * k + x, item.top * k + y];
    const outside = left < 0 || top < 0 || left + 40 > clientWidth || top + 20 > clientHeight;
    if (outside) this.pan(clientWidth / 2 - left - (item.w * k) / 2, clientHeight / 2 - top - 20);
  }

  hit(screenX, screenY) {
    const { k, x, y } = this.view;
    const [wx, wy] = [(screenX - x) / k, (screenY - y) / k];
    const within = (item) =>
      wx >= item.left && wy >= item.top && wx <= item.left + item.w && wy <= item.top + item.h;
    let found = this.tree?.root;
    if (!found || !within(found)) return null;
    while (found.open) {
      const inner = found.children.find(within);
      if (!inner) break;
      found = inner;
    }
    return found;
  }

  hover(item, x, y) {
    const shown = item && item.kind !== "root" ? item : null;
    if (shown !== this.hovered) {
      this.hovered = shown;
      this.redraw();
    }
    if (shown) this.tip.show(x, y, ...summary(shown));
    else this.tip.hide();
  }

  // --- Sizes ---

  textWidth(text, font) {
    const key = `${font}|${text}`;
    if (!this.widths.has(key)) {
      this.pen ??= document.createElement("canvas").getContext("2d");
      this.pen.font = font;
      this.widths.set(key, this.pen.measureText(text).width);
    }
    return this.widths.get(key);
  }

  measure(item, titleOnly) {
    const title = this.textWidth(clipped(titleOf(item), 52), TITLE_FONT);
    if (titleOnly) return { w: title + 34 + this.textWidth(tallyOf(item), SMALL_FONT) + 26, h: TITLE };
    switch (item.kind) {
      case "node": {
        const pills = pillsOf(item).reduce(
          (sum, [text]) => sum + this.textWidth(text, PILL_FONT) + 16,
          0,
        );
        const sub = this.textWidth(clipped(subOf(item), 34), SMALL_FONT);
        return {
          w: Math.max(this.textWidth(clipped(titleOf(item), 34), NODE_FONT) + pills, sub, 84) + 26,
          h: NODE_HEIGHT,
        };
      }
      case "switch":
        return { w: this.textWidth(switchText(item), SMALL_FONT) + 62, h: 36 };
      case "start":
      case "end":
        return { w: title + 36, h: 28 };
      default:
        return { w: Math.max(title + 40, this.textWidth(tallyOf(item), SMALL_FONT) + 40, 120), h: 48 };
    }
  }

  // --- Drawing ---

  draw(pen, width, height, colors) {
    if (!this.tree) return;
    const { k, x, y } = this.view;
    this.colors = colors;
    this.window = { left: -x / k, top: -y / k, right: (width - x) / k, bottom: (height - y) / k };
    pen.save();
    pen.translate(x, y);
    pen.scale(k, k);
    pen.lineJoin = "round";
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    this.drawInside(pen, this.tree.root, 0);
    this.drawData(pen);
    for (const item of [this.hovered, this.selection])
      if (item && this.visible(item)) this.drawRing(pen, item, item === this.selection);
    pen.restore();
    if (k < 0.5) this.drawLabels(pen);
  }

  outside(item) {
    const { left, top, right, bottom } = this.window;
    return item.left > right || item.top > bottom || item.left + item.w < left || item.top + item.h < top;
  }

  drawInside(pen, item, depth) {
    pen.save();
    pen.translate(item.left, item.top);
    for (const edge of item.edges) this.drawEdge(pen, edge);
    this.drawStubs(pen, item);
    pen.restore();
    for (const child of item.children) {
      if (this.outside(child)) continue;
      if (child.open && child.children) {
        this.drawOpen(pen, child, depth);
        this.drawInside(pen, child, depth + 1);
      } else {
        this.drawClosed(pen, child);
      }
    }
  }

  drawEdge(pen, edge) {
    const { colors } = this;
    const { k } = this.view;
    const marked = [this.hovered, this.selection].some(
      (item) => item && (edge.from === item || edge.to === item),
    );
    const color = edge.back ? colors.loop : marked ? colors.accent : colors.edge;
    pen.strokeStyle = pen.fillStyle = color;
    pen.lineWidth = Math.max(marked || edge.back ? 1.8 : 1.2, 0.7 / k);
    pen.setLineDash(edge.back ? [6, 4] : []);
    pen.beginPath();
    for (const part of edge.route) {
      const [first, last] = [part[0], part.at(-1)];
      pen.moveTo(...first);
      if (part.length === 2) {
        const middle = (first[1] + last[1]) / 2;
        pen.bezierCurveTo(first[0], middle, last[0], middle, ...last);
      } else {
        for (let i = 1; i < part.length - 1; i += 1) pen.arcTo(...part[i], ...part[i + 1], 8);
        pen.lineTo(...last);
      }
    }
    pen.stroke();
    pen.setLineDash([]);
    if (k < 0.22) return;
    const end = edge.route.at(-1);
    arrow(pen, end.at(-1), edge.back ? [-1, 0] : [0, 1]);
    if (edge.title && k > 0.4) {
      const [x, y] = edge.route[0][0];
      const [tx] = edge.route[0].at(-1);
      pen.font = SMALL_FONT;
      pen.fillStyle = colors.muted;
      pen.fillText(edge.title, x + (tx - x) * 0.6 + 5, y + 16);
    }
  }

  // Edges that come into an open box from outside, or leave it, go on to the box's border.
  drawStubs(pen, item) {
    if (item.kind === "root") return;
    pen.strokeStyle = this.colors.edge;
    pen.lineWidth = 1.2;
    pen.globalAlpha = 0.6;
    pen.beginPath();
    const led = new Set(item.edges.filter((edge) => !edge.back).map((edge) => edge.to));
    const leads = new Set(item.edges.filter((edge) => !edge.back).map((edge) => edge.from));
    for (const child of item.children) {
      const x = child.x + child.w / 2;
      if (child.enters && !led.has(child) && child.y < TITLE + 30) {
        pen.moveTo(x, TITLE);
        pen.lineTo(x, child.y);
      }
      if (child.exits && !leads.has(child) && child.y + child.h > item.h - 40) {
        pen.moveTo(x, child.y + child.h);
        pen.lineTo(x, item.h);
      }
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  drawOpen(pen, item, depth) {
    const { colors } = this;
    const { left, top, w, h: high } = item;
    const style = look(item, colors);
    pen.fillStyle = style.fill ?? (depth % 2 ? colors.groupDeep : colors.group);
    pen.strokeStyle = style.line ?? colors.line;
    pen.lineWidth = Math.max(style.width ?? 1, 0.6 / this.view.k);
    pen.setLineDash(style.dash ?? []);
    rounded(pen, left, top, w, high, style.radius ?? 8);
    pen.fill();
    pen.stroke();
    pen.setLineDash([]);
    if (this.view.k < 0.28) return;
    chevron(pen, left + 14, top + 16, true, colors.muted);
    pen.font = TITLE_FONT;
    pen.fillStyle = style.text ?? colors.text;
    const title = clipped(titleOf(item), 52);
    pen.fillText(title, left + 25, top + 20.5);
    pen.font = SMALL_FONT;
    pen.fillStyle = colors.muted;
    pen.fillText(tallyOf(item), left + 33 + this.textWidth(title, TITLE_FONT), top + 20.5);
  }

  drawClosed(pen, item) {
    if (item.kind === "node") this.drawNode(pen, item);
    else if (item.kind === "switch") this.drawSwitch(pen, item);
    else if (item.kind === "start" || item.kind === "end") this.drawEnd(pen, item);
    else this.drawGroup(pen, item);
    if (item.found) this.drawFound(pen, item);
  }

  drawNode(pen, item) {
    const { colors } = this;
    const { k } = this.view;
    const { node, left, top, w, h: high } = item;
    const color = node.backward ? colors.backward : colors.forward;
    if (k < 0.16) {
      pen.fillStyle = color;
      pen.globalAlpha = 0.75;
      pen.fillRect(left, top, w, high);
      pen.globalAlpha = 1;
      return;
    }
    pen.strokeStyle = colors.nodeLine;
    pen.lineWidth = 1;
    pen.fillStyle = colors.node;
    if (node.variants > 1) {
      // Several shapes are several cards.
      rounded(pen, left + 4, top + 4, w, high, 6);
      pen.fill();
      pen.stroke();
    }
    pen.setLineDash(node.dynamic ? [4, 3] : []);
    rounded(pen, left, top, w, high, 6);
    pen.fill();
    pen.stroke();
    pen.setLineDash([]);
    if (item.share >= LEAST_SHARE) {
      pen.fillStyle = colors.heat;
      pen.globalAlpha = 0.08 + 0.42 * item.heat;
      rounded(pen, left, top, w, high, 6);
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.fillStyle = color;
    pen.beginPath();
    pen.roundRect(left, top, 5, high, [6, 0, 0, 6]);
    pen.fill();
    if (k < 0.28) return;
    const title = clipped(titleOf(item), 34);
    pen.font = NODE_FONT;
    pen.fillStyle = colors.text;
    pen.fillText(title, left + 14, top + 17.5);
    let x = left + w - 7;
    for (const [text, tone] of pillsOf(item)) {
      const length = this.textWidth(text, PILL_FONT) + 10;
      x -= length;
      pen.fillStyle = colors[tone];
      pen.globalAlpha = 0.16;
      rounded(pen, x, top + 6, length, 14, 7);
      pen.fill();
      pen.globalAlpha = 1;
      pen.font = PILL_FONT;
      pen.fillStyle = colors.text;
      pen.fillText(text, x + 5, top + 16.3);
      x -= 5;
    }
    if (k < 0.42) return;
    pen.font = SMALL_FONT;
    pen.fillStyle = colors.muted;
    pen.fillText(clipped(subOf(item), 34), left + 14, top + 33);
  }

  drawGroup(pen, item) {
    const { colors } = this;
    const { k } = this.view;
    const { left, top, w, h: high } = item;
    const style = look(item, colors);
    pen.fillStyle = style.fill ?? colors.group;
    pen.strokeStyle = style.line ?? colors.strongLine;
    pen.lineWidth = Math.max(style.width ?? 1, 0.6 / k);
    pen.setLineDash(style.dash ?? []);
    rounded(pen, left, top, w, high, style.radius ?? 8);
    pen.fill();
    pen.stroke();
    pen.setLineDash([]);
    if (item.backward) {
      pen.fillStyle = colors.backward;
      pen.beginPath();
      pen.roundRect(left, top, 5, high, [8, 0, 0, 8]);
      pen.fill();
    }
    if (k < 0.28) return;
    chevron(pen, left + 15, top + 18, false, colors.muted);
    pen.font = TITLE_FONT;
    pen.fillStyle = style.text ?? colors.text;
    pen.fillText(clipped(titleOf(item), 52), left + 26, top + 21);
    pen.font = SMALL_FONT;
    pen.fillStyle = colors.muted;
    pen.fillText(tallyOf(item), left + 26, top + 38);
  }

  drawSwitch(pen, item) {
    const { colors } = this;
    const { left, top, w, h: high } = item;
    pen.strokeStyle = colors.mixed;
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.moveTo(left, top + high / 2);
    pen.lineTo(left + 18, top);
    pen.lineTo(left + w - 18, top);
    pen.lineTo(left + w, top + high / 2);
    pen.lineTo(left + w - 18, top + high);
    pen.lineTo(left + 18, top + high);
    pen.closePath();
    pen.fillStyle = colors.page;
    pen.fill();
    pen.stroke();
    if (this.view.k < 0.28) return;
    pen.font = SMALL_FONT;
    pen.fillStyle = colors.text;
    pen.textAlign = "center";
    pen.fillText(switchText(item), left + w / 2, top + high / 2 + 4);
    pen.textAlign = "left";
  }

  drawEnd(pen, item) {
    const { colors } = this;
    pen.fillStyle = colors.group;
    pen.strokeStyle = colors.strongLine;
    pen.lineWidth = 1;
    rounded(pen, item.left, item.top, item.w, item.h, item.h / 2);
    pen.fill();
    pen.stroke();
    if (this.view.k < 0.28) return;
    pen.font = TITLE_FONT;
    pen.fillStyle = colors.muted;
    pen.fillText(item.title, item.left + 18, item.top + 18.5);
  }

  drawFound(pen, item) {
    const { colors } = this;
    const { k } = this.view;
    const { left, top, w, h: high } = item;
    pen.strokeStyle = colors.hit;
    pen.lineWidth = Math.max(3, 2 / k);
    rounded(pen, left - 2, top - 2, w + 4, high + 4, 8);
    pen.stroke();
    if (item.kind === "node" || k < 0.28) return;
    const text = count(item.found);
    pen.font = PILL_FONT;
    const length = this.textWidth(text, PILL_FONT) + 12;
    pen.fillStyle = colors.hit;
    rounded(pen, left + w - length - 6, top - 9, length, 17, 8);
    pen.fill();
    pen.fillStyle = "#1b1b1b";
    pen.fillText(text, left + w - length, top + 3);
  }

  drawRing(pen, item, strong) {
    pen.strokeStyle = this.colors.accent;
    pen.lineWidth = Math.max(strong ? 2.5 : 1.5, (strong ? 2 : 1.2) / this.view.k);
    rounded(pen, item.left, item.top, item.w, item.h, 7);
    pen.stroke();
  }

  // Where the selected operator's inputs come from, and where its outputs go.
  drawData(pen) {
    const item = this.selection;
    if (!item?.node || !this.visible(item)) return;
    const { colors } = this;
    const { k } = this.view;
    const draw = (node, color, into) => {
      const other = this.tree.boxOf.get(node);
      if (!other || other === item) return;
      const end = this.standIn(other);
      const [from, to] = into ? [end, item] : [item, end];
      const below = to.top > from.top + from.h;
      const side = to.left + to.w / 2 > from.left + from.w / 2 ? 1 : -1;
      const middle = (box, right) => [
        box.left + (right ? box.w : 0),
        box.top + Math.min(box.h, NODE_HEIGHT) / 2,
      ];
      const a = below ? [from.left + from.w / 2, from.top + from.h] : middle(from, side > 0);
      const b = below ? [to.left + to.w / 2, to.top] : middle(to, side < 0);
      const [dx, dy] = below ? [0, 1] : [side, 0];
      const bend = Math.max(Math.abs(below ? b[1] - a[1] : b[0] - a[0]) / 2, 30);
      pen.strokeStyle = pen.fillStyle = color;
      pen.lineWidth = Math.max(2, 1.4 / k);
      pen.beginPath();
      pen.moveTo(...a);
      pen.bezierCurveTo(a[0] + dx * bend, a[1] + dy * bend, b[0] - dx * bend, b[1] - dy * bend, ...b);
      pen.stroke();
      arrow(pen, b, [dx, dy], 7);
    };
    for (const node of item.node.sources) draw(node, colors.pythonStall, true);
    for (const node of item.node.users) draw(node, colors.graph, false);
  }

  // From afar, names in a size that can be read, where there is room for them.
  drawLabels(pen) {
    const { k } = this.view;
    const taken = [];
    const visit = (item) => {
      if (item.kind !== "root") {
        if (this.outside(item)) return;
        const drawn = k >= 0.28 || item.kind === "node" || item.kind === "switch";
        if (!drawn) this.drawLabel(pen, item, taken);
      }
      if (item.open && item.children) item.children.forEach(visit);
    };
    pen.font = `600 11px ${SANS}`;
    visit(this.tree.root);
  }

  drawLabel(pen, item, taken) {
    const { k, x, y } = this.view;
    const [left, top, w, high] = [item.left * k + x, item.top * k + y, item.w * k, item.h * k];
    const room = Math.floor((w - 8) / 6.2);
    const title = titleOf(item);
    if (room < Math.min(title.length, 12) || high < 13) return;
    const text = clipped(title, room);
    const width = this.textWidth(text, `600 11px ${SANS}`);
    const middle = !item.open;
    const place = {
      left: left + 4,
      top: middle ? top + high / 2 - 8 : top + 1,
      right: left + 10 + width,
      bottom: 0,
    };
    place.bottom = place.top + 15;
    if (
      taken.some(
        (t) => t.left < place.right && place.left < t.right && t.top < place.bottom && place.top < t.bottom,
      )
    )
      return;
    taken.push(place);
    const { colors } = this;
    pen.globalAlpha = 0.86;
    pen.fillStyle = colors.page;
    rounded(pen, place.left - 1, place.top, width + 6, 15, 3);
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = look(item, colors).text ?? colors.text;
    pen.fillText(text, place.left + 2, place.top + 11.5);
  }
}

const NODE_FONT = `600 12.5px ${SANS}`;
const TITLE_FONT = `600 12.5px ${SANS}`;
const SMALL_FONT = `11px ${SANS}`;
const PILL_FONT = `10.5px ${SANS}`;

// Opens boxes from the outside in, forward and the largest first, while there is room.
function openFirst(root, room, wanted = () => true) {
  let shown = root.children.length;
  let layer = [root];
  root.open = true;
  while (layer.length) {
    const inner = layer.flatMap((item) => item.children).filter((item) => item.children?.length);
    layer = [];
    for (const item of inner.sort((a, b) => a.backward - b.backward || b.leaves - a.leaves)) {
      if (shown + item.children.length > room || !wanted(item)) {
        if (item.kind !== "loop") item.open = false;
        continue;
      }
      item.open = true;
      shown += item.children.length;
      layer.push(item);
    }
  }
}

function look(item, colors) {
  if (item.kind === "loop")
    return { fill: colors.loopSoft, line: colors.loop, text: colors.loop, dash: [7, 4], width: 1.5 };
  if (item.kind === "block") return { fill: colors.blockSoft, line: colors.block, radius: 2, width: 1.4 };
  if (item.kind === "part") return { dash: [2, 3] };
  return {};
}

function titleOf(item) {
  return item.node ? shortOp(item.node.op) : item.title;
}

function subOf(item) {
  const { node } = item;
  const shape = node.out.length > 1 ? `${node.out[0]} +${node.out.length - 1}` : node.out[0];
  return shape || baseLine(node.line);
}

function tallyOf(item) {
  if (!item.leaves) return "";
  const parts = [plural(item.leaves, "operator")];
  if (item.kind === "block") {
    if (item.within) parts.push(item.within);
    if (item.block.ends) parts.push("may end here");
  } else if (item.loop) {
    const line = item.loop.header;
    const header = item.children.length ? firstNode(item, line) : null;
    if (header) parts.push(baseLine(header.line));
  }
  if (item.share >= LEAST_SHARE) parts.push(`${percent(item.share, 1)} of the kernels' time`);
  return parts.join(" · ");
}

function firstNode(item, id) {
  const found = [item];
  for (const at of found) {
    if (at.node && (id === undefined || at.node.id === id)) return at.node;
    found.push(...(at.children ?? []));
  }
  return null;
}

function switchText(item) {
  return `Switch-Case · ${item.cases.length} ways`;
}

function pillsOf(item) {
  const { node } = item;
  const pills = [];
  if (node.ends) pills.push(["end", "muted"]);
  if (node.fetched) pills.push(["fetched", "pythonStall"]);
  if (node.dynamic) pills.push(["dynamic", "loop"]);
  if (node.variants > 1) pills.push([`${node.variants} shapes`, "forward"]);
  if (item.share >= LEAST_SHARE) pills.push([percent(item.share, 1), "heat"]);
  return pills;
}

// What a tooltip says.
function summary(item) {
  const { node } = item;
  if (node) {
    return [
      h("b", null, node.op),
      facts([
        ["line", shortLine(node.line)],
        ["module", node.module],
        ["in", item.context],
        ["makes", node.out.join(", ")],
        ["shapes seen", count(node.variants)],
        ["inputs", inputWords(node)],
        ["ran", ranWords(item)],
        [
          "note",
          pillsOf(item)
            .map(([text]) => text)
            .join(", "),
        ],
      ]),
    ];
  }
  if (item.kind === "switch") {
    const cases = item.cases.map((block, number) => [
      `case ${number}`,
      block ? `block ${block.id}` : "the iteration ends",
    ]);
    return [h("b", null, "Switch-Case"), facts(cases)];
  }
  const first = firstNode(item);
  return [
    h("b", null, item.title),
    facts([
      ["holds", item.leaves ? plural(item.leaves, "operator") : null],
      ["ran", ranWords(item)],
      ["from", first ? shortLine(first.line) : null],
      ["note", item.kind === "block" && item.block.ends ? "an iteration may end behind it" : null],
    ]),
  ];
}

function ranWords({ ran, share }) {
  return ran ? `${duration(ran)}, ${percent(share, 1)} of the kernels' time` : null;
}

function inputWords(node) {
  const words = { state: "state", feed: "fed" };
  return node.inputs.map((sources) => sources.map((id) => words[id] ?? `#${id}`).join(" or ")).join(", ");
}

const CLIPPED = new Map();

function clipped(text, room) {
  if (text.length <= room) return text;
  const key = `${room}|${text}`;
  if (!CLIPPED.has(key))
    CLIPPED.set(key, `${text.slice(0, Math.ceil(room * 0.65) - 1)}…${text.slice(-Math.floor(room * 0.35))}`);
  return CLIPPED.get(key);
}

function rounded(pen, x, y, w, high, radius) {
  pen.beginPath();
  pen.roundRect(x, y, w, high, radius);
}

function arrow(pen, [x, y], [dx, dy], size = 6) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x - dx * size - dy * size * 0.55, y - dy * size - dx * size * 0.55);
  pen.lineTo(x - dx * size + dy * size * 0.55, y - dy * size + dx * size * 0.55);
  pen.fill();
}

function chevron(pen, x, y, down, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.8;
  pen.beginPath();
  if (down) {
    pen.moveTo(x - 4, y - 2);
    pen.lineTo(x, y + 2.5);
    pen.lineTo(x + 4, y - 2);
  } else {
    pen.moveTo(x - 2, y - 4);
    pen.lineTo(x + 2.5, y);
    pen.lineTo(x - 2, y + 4);
  }
  pen.stroke();
}
