// A part of a horizontal axis, which the pointer, the wheel and the keyboard move and zoom.
//
// Dragging selects what to zoom to; with Shift, or in a part already, the wheel moves; Ctrl and the wheel zoom.

class Span {
  constructor(canvas, { from, to, least, plot, changed, hovered }) {
    Object.assign(this, { canvas, first: from, last: to, from, to, least, plot, changed, hovered });
    this.dragged = null; // the axis values between which the pointer is drawn
    canvas.tabIndex = 0;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => this.release());
    canvas.addEventListener("pointercancel", () => this.release());
    canvas.addEventListener("pointerleave", () => hovered(null));
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // The axis value at a place on the canvas.
  at(x) {
    const { left, width } = this.plot();
    return this.from + ((x - left) / width) * (this.to - this.from);
  }

  // The place of an axis value.
  x(value) {
    const { left, width } = this.plot();
    return left + ((value - this.from) / (this.to - this.from)) * width;
  }

  show(from, to) {
    const length = Math.min(Math.max(to - from, this.least), this.last - this.first);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - length / 2, this.first), this.last - length);
    this.to = this.from + length;
    this.changed();
  }

  reset() {
    this.show(this.first, this.last);
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const length = (this.to - this.from) * factor;
    if (length < this.least && factor < 1) return;
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.at(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX || event.deltaY) / this.plot().width);
    } else return; // the page scrolls
    event.preventDefault();
  }

  press(event) {
    if (event.button !== 0) return;
    const { left, width } = this.plot();
    if (event.offsetX < left || event.offsetX > left + width) return;
    this.dragged = [this.at(event.offsetX), this.at(event.offsetX)];
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.dragged) {
      this.dragged[1] = Math.min(Math.max(this.at(event.offsetX), this.from), this.to);
      this.changed();
    }
    this.hovered(event.offsetX, event.offsetY);
  }

  release() {
    const dragged = this.dragged;
    this.dragged = null;
    if (!dragged) return;
    const [from, to] = dragged.sort((a, b) => a - b);
    if (this.x(to) - this.x(from) > 4) this.show(from, to);
    else this.changed();
  }

  key(event) {
    const action = {
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      Home: () => this.pan(-1e9),
      End: () => this.pan(1e9),
      "+": () => this.zoom(0.6),
      "=": () => this.zoom(0.6),
      "-": () => this.zoom(1 / 0.6),
      0: () => this.reset(),
    }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  // The part that is being selected.
  drawDragged(pen, top, height, color) {
    if (!this.dragged) return;
    const [a, b] = this.dragged.map((value) => this.x(value));
    pen.globalAlpha = 0.18;
    pen.fillStyle = color;
    pen.fillRect(Math.min(a, b), top, Math.abs(b - a), height);
    pen.globalAlpha = 1;
  }

  // Buttons for those who have no wheel.
  buttons() {
    const button = (title, text, action) =>
      h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    return h(
      "span",
      { class: "buttons" },
      button("Zoom in", "+", () => this.zoom(0.6)),
      button("Zoom out", "−", () => this.zoom(1 / 0.6)),
      button("Earlier", "←", () => this.pan(-0.5)),
      button("Later", "→", () => this.pan(0.5)),
      button("Show all", "All", () => this.reset()),
    );
  }
}
