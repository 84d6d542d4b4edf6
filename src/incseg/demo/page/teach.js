// The view to teach a class: photographs, a mask drawn or loaded for each, a name. All of it is sent to the server in
// one request. A mask is stored as the list of its strokes, so every stroke can be undone.

const LONGEST_MASK = 1024; // longer side of a mask in pixels
const SMALL_FILE = 4 << 20; // a larger photograph is reduced before it is sent
const COLOUR = "#e5007d";
const NEAR = 16; // pixels of the screen around the first corner of an outline that close it
const LASSO = 12; // pixels of the screen that a finger moves before an outline follows it

const find = (selector, root = document) => root.querySelector(selector);
const view = () => find("#teach");

let limits; // the limits of the server
let model = null; // {index, name, steps} of the card that is taught
let photos = []; // {blob, name, bitmap, width, height, done, thumb}
let at = -1;
let stroke = null; // under the pointer: {kind, points, width}
let outline = null; // corners of an outline that is not closed
let busy = null; // an AbortController
let onDone;

// ---------- photographs

async function addPhotos(files) {
  say(null);
  for (const file of files) {
    if (photos.length === limits.photographs) {
      say(`At most ${limits.photographs} photographs can be given at once.`);
      break;
    }
    const name = file.name || "photograph";
    try {
      const bitmap = await createImageBitmap(file);
      const shrink = Math.min(1, LONGEST_MASK / Math.max(bitmap.width, bitmap.height));
      const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * shrink)));
      photos.push({blob: file, name, bitmap, width, height, done: [], marked: 0, thumb: newCanvas(width, height)});
      drawThumb(photos.at(-1));
      at = photos.length - 1;
    } catch {
      say(`${name} cannot be opened as an image.`);
    }
  }
  outline = null;
  render();
}

function newCanvas(width, height) {
  return Object.assign(document.createElement("canvas"), {width, height});
}

function removePhoto(index) {
  photos.splice(index, 1)[0].bitmap.close();
  at = Math.min(at, photos.length - 1);
  outline = null;
  render();
}

/** Return the photograph to send: the file itself, or one reduced to the size that the server uses. */
async function asSent({blob, bitmap}, types) {
  const shrink = limits.side / Math.max(bitmap.width, bitmap.height);
  if (shrink >= 1 && blob.size <= SMALL_FILE && types.includes(blob.type)) return blob;
  const share = Math.min(1, shrink);
  const canvas = newCanvas(Math.max(1, Math.round(bitmap.width * share)), Math.max(1, Math.round(bitmap.height * share)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
}

// ---------- masks

/** Draw one edit: a line of the brush or the eraser, a filled outline, or a mask from a file. */
function draw(context, {kind, points, width, mask}) {
  context.globalCompositeOperation = kind === "erase" ? "destination-out" : "source-over";
  context.fillStyle = context.strokeStyle = COLOUR;
  if (kind === "mask") {
    context.drawImage(mask, 0, 0);
    return;
  }
  context.beginPath();
  points.forEach(({x, y}, i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  if (kind === "outline") {
    context.fill();
    return;
  }
  if (points.length === 1) context.lineTo(points[0].x + 0.01, points[0].y);
  Object.assign(context, {lineWidth: width, lineCap: "round", lineJoin: "round"});
  context.stroke();
}

function drawMask(photo, context) {
  context.clearRect(0, 0, photo.width, photo.height);
  const cleared = photo.done.findLastIndex(({kind}) => kind === "clear");
  for (const one of photo.done.slice(cleared + 1)) draw(context, one);
}

/** Draw the thumbnail of a photograph with its mask, and count the marked pixels. */
function drawThumb(photo) {
  const context = photo.thumb.getContext("2d");
  drawMask(photo, context);
  photo.marked = pixelsOf(photo).marked;
  context.globalCompositeOperation = "destination-over";
  context.drawImage(photo.bitmap, 0, 0, photo.width, photo.height);
}

/** Return the black and white pixels of a mask, and whether any of them is marked. */
function pixelsOf(photo) {
  const context = newCanvas(photo.width, photo.height).getContext("2d", {willReadFrequently: true});
  drawMask(photo, context);
  const pixels = context.getImageData(0, 0, photo.width, photo.height);
  const words = new Uint32Array(pixels.data.buffer);
  let marked = 0;
  for (let i = 0; i < words.length; i++) {
    const is = words[i] >>> 24 > 127;
    marked += is;
    words[i] = is ? 0xffffffff : 0xff000000;
  }
  return {pixels, marked};
}

function maskFile(photo) {
  const canvas = newCanvas(photo.width, photo.height);
  canvas.getContext("2d").putImageData(pixelsOf(photo).pixels, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function loadMask(file) {
  const photo = photos[at];
  if (!file || !photo) return;
  try {
    const bitmap = await createImageBitmap(file, {premultiplyAlpha: "none", colorSpaceConversion: "none"});
    if (Math.abs(bitmap.width * photo.height / (bitmap.height * photo.width) - 1) > 0.02 + 1 / Math.min(bitmap.width, bitmap.height)) {
      const shape = (one) => `${one.width}×${one.height}`;
      say(`The mask is ${shape(bitmap)} pixels and the photograph ${shape(photo.bitmap)}: give a mask of its shape.`);
      return;
    }
    const mask = newCanvas(photo.width, photo.height);
    const context = mask.getContext("2d", {willReadFrequently: true});
    context.imageSmoothingEnabled = false;
    context.drawImage(bitmap, 0, 0, photo.width, photo.height);
    const pixels = context.getImageData(0, 0, photo.width, photo.height);
    const words = new Uint32Array(pixels.data.buffer);
    const [red, green, blue] = [1, 3, 5].map((i) => parseInt(COLOUR.slice(i, i + 2), 16));
    const colour = (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
    for (let i = 0; i < words.length; i++) words[i] = words[i] >>> 24 > 127 && words[i] & 0xffffff ? colour : 0;
    context.putImageData(pixels, 0, 0);
    photo.done.push({kind: "mask", mask});
    say(null);
  } catch {
    say(`${file.name} cannot be opened as an image.`);
  }
  render();
}

// ---------- drawing

const tool = () => find("[name='tool']:checked", view()).value;
const board = () => find(".ink", view());
const brushWidth = () => Number(find("#brush").value) / 100 * Math.min(photos[at].width, photos[at].height);

/** Return the place of an event in pixels of the mask. */
function place(event) {
  const box = board().getBoundingClientRect(), {width, height} = photos[at];
  return {x: (event.clientX - box.left) / box.width * width, y: (event.clientY - box.top) / box.height * height};
}

/** Return the distance of two places in pixels of the screen. */
function apart(one, other) {
  return Math.hypot(one.x - other.x, one.y - other.y) * board().getBoundingClientRect().width / photos[at].width;
}

function press(event) {
  if (!event.isPrimary || event.button || at < 0 || busy) return;
  event.preventDefault();
  board().setPointerCapture(event.pointerId);
  const here = place(event);
  if (tool() === "outline") {
    if (outline?.length > 2 && apart(here, outline[0]) < NEAR) return closeOutline();
    outline = [...(outline ?? []), here];
    stroke = {kind: "lasso", points: [here]};
  } else {
    stroke = {kind: tool(), points: [here], width: brushWidth()};
    draw(board().getContext("2d"), stroke);
  }
  drawGuide();
}

function move(event) {
  if (!event.isPrimary || at < 0) return;
  const here = place(event);
  if (stroke?.kind === "lasso") {
    const last = stroke.points.at(-1);
    if (apart(here, last) < (stroke.points.length > 1 ? 3 : LASSO)) return;
    stroke.points.push(here);
    outline.push(here);
  } else if (stroke) {
    const events = event.getCoalescedEvents?.() ?? [];
    for (const each of events.length ? events : [event]) {
      const next = place(each), last = stroke.points.at(-1);
      stroke.points.push(next);
      draw(board().getContext("2d"), {...stroke, points: [last, next]});
    }
  }
  drawGuide(event.pointerType === "mouse" ? here : null);
}

function release() {
  if (!stroke) return;
  const {kind, points} = stroke;
  if (kind === "lasso") {
    stroke = null;
    if (points.length > 8) closeOutline(); // drawn in one stroke
    else render();
    return;
  }
  photos[at].done.push(stroke);
  stroke = null;
  render();
}

/** Cancel the stroke: a second finger shows that the first was not drawing. */
function giveUp() {
  if (stroke?.kind === "lasso") outline = outline.slice(0, -stroke.points.length);
  stroke = null;
  render();
}

function closeOutline() {
  if (outline?.length > 2) photos[at].done.push({kind: "outline", points: outline});
  outline = stroke = null;
  render();
}

function undo() {
  if (outline?.length > 1) outline.pop();
  else if (outline) outline = null;
  else photos[at]?.done.pop();
  render();
}

/** Draw the open outline, and the size of the brush under the pointer. */
function drawGuide(pointer = null) {
  const photo = photos[at], canvas = find(".guide", view()), context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const unit = photo.width / (board().getBoundingClientRect().width || photo.width);
  const both = (path) => { // visible on any background
    for (const [colour, width] of [["#000", 4], ["#fff", 2]]) {
      Object.assign(context, {strokeStyle: colour, lineWidth: width * unit, lineJoin: "round"});
      context.stroke(path);
    }
  };
  if (outline) {
    const line = new Path2D();
    outline.forEach(({x, y}, i) => (i ? line.lineTo(x, y) : line.moveTo(x, y)));
    if (pointer) line.lineTo(pointer.x, pointer.y);
    both(line);
    const first = new Path2D();
    first.arc(outline[0].x, outline[0].y, 7 * unit, 0, 7);
    context.fillStyle = COLOUR;
    context.fill(first);
    both(first);
  } else if (pointer && tool() !== "outline") {
    const round = new Path2D();
    round.arc(pointer.x, pointer.y, brushWidth() / 2, 0, 7);
    both(round);
  }
}

// ---------- the view

function say(message) {
  const line = find(".teach-error", view());
  line.hidden = !message;
  line.textContent = message ?? "";
}

const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function render() {
  const photo = photos[at];
  view().classList.toggle("bare", !photo);
  const canvases = [find(".photo", view()), board(), find(".guide", view())];
  if (photo) {
    for (const canvas of canvases) {
      if (canvas.width !== photo.width || canvas.height !== photo.height) Object.assign(canvas, {width: photo.width, height: photo.height});
    }
    find(".drawing", view()).style.setProperty("--ratio", photo.width / photo.height);
    canvases[0].getContext("2d").drawImage(photo.bitmap, 0, 0, photo.width, photo.height);
    drawMask(photo, canvases[1].getContext("2d"));
    drawGuide();
    drawThumb(photo);
  }
  find(".tools .width", view()).classList.toggle("unused", tool() === "outline");
  find("#close-outline").hidden = !(outline?.length > 2);
  find("#undo").disabled = !(outline || photo?.done.length);
  find("#clear").disabled = !photo?.marked;
  find(".hint", view()).textContent = hint(photo);
  renderPhotos();
  const marked = photos.filter((each) => each.marked).length;
  find(".tally", view()).textContent =
    photos.length === 0 ? "No photograph yet." : `${counted(photos.length, "photograph")}, ${marked} marked.`;
  find("#teach-now").disabled = Boolean(busy) || marked === 0 || !find("#class-name").value.trim();
}

function hint(photo) {
  if (!photo) return "";
  if (tool() === "outline") {
    return outline
      ? "Set the next corner. The round mark closes the outline."
      : "Draw around the object in one stroke, or set corner after corner.";
  }
  return tool() === "erase" ? "Wipe over what does not belong to the class." : "Paint over every object of the class in this photograph.";
}

function renderPhotos() {
  const list = find("#photos");
  list.replaceChildren(...photos.map((photo, index) => {
    const item = document.createElement("li");
    const choose = document.createElement("button");
    choose.type = "button";
    choose.className = "thumb";
    choose.setAttribute("aria-pressed", String(index === at));
    choose.setAttribute("aria-label", `${photo.name}, ${photo.marked ? "marked" : "not marked"}`);
    choose.append(photo.thumb);
    choose.addEventListener("click", () => {
      at = index;
      outline = null;
      render();
    });
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${photo.name}`);
    remove.addEventListener("click", () => removePhoto(index));
    const note = document.createElement("span");
    note.className = "quiet";
    note.textContent = photo.marked ? "marked" : "not in it";
    item.append(choose, remove, note);
    return item;
  }));
}

/** Show the view for a model; the photograph in view is the first one to mark. */
export function openTeaching(of, step, current) {
  const other = model && model.index !== of.index;
  model = of;
  const base = find("#base"), before = base.value;
  base.replaceChildren(...of.steps.filter((each) => !each.cannot_learn).map((each) => new Option(each.label, each.step)));
  base.value = photos.length && !other ? before : step; // photographs that were taught already are not counted twice
  if (base.selectedIndex < 0) base.value = step;
  find("#teach-title").textContent = `Teach “${of.name}” a class`;
  view().hidden = false;
  document.body.classList.add("teaching");
  window.scrollTo(0, 0);
  say(null);
  if (photos.length === 0 && current) addPhotos([new File([current.blob], current.name, {type: current.blob.type})]);
  else render();
}

export function closeTeaching() {
  busy?.abort();
  view().hidden = true;
  document.body.classList.remove("teaching");
}

export const isTeaching = () => !view().hidden;

async function teach(types) {
  say(null);
  closeOutline();
  busy = new AbortController();
  const {signal} = busy, began = performance.now();
  const status = find(".progress", view());
  const tick = () => (status.textContent = `Teaching … ${Math.round((performance.now() - began) / 1000)} s`);
  const clock = setInterval(tick, 500);
  tick();
  setBusy(true);
  try {
    const files = [];
    for (const photo of photos) files.push(await asSent(photo, types), await maskFile(photo));
    const sizes = photos.map((_, i) => [files[2 * i].size, files[2 * i + 1].size]);
    const head = new TextEncoder().encode(JSON.stringify({
      model: model.index, step: Number(find("#base").value), name: find("#class-name").value, photographs: sizes,
    }));
    const length = new DataView(new ArrayBuffer(4));
    length.setUint32(0, head.length, true);
    const body = new Blob([length.buffer, head, ...files]);
    if (body.size > limits.bytes) throw new Error("the photographs are too large in total; give fewer");
    const response = await fetch("/teach", {
      method: "POST", body, headers: {"Content-Type": "application/octet-stream"}, signal,
    });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(answer.error ?? `the server answered ${response.status}`);
    await onDone(answer, {blob: files[2 * at], name: photos[at].name});
  } catch (error) {
    if (error.name === "AbortError") say("Stopped. The model has not changed.");
    else if (error instanceof TypeError) say("The server does not answer; is it still running?");
    else say(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`);
  } finally {
    clearInterval(clock);
    busy = null;
    setBusy(false);
    render();
  }
}

function setBusy(now) {
  find(".progress", view()).hidden = !now;
  find("#stop").hidden = !now;
  find("#teach-now").hidden = now;
  for (const part of view().querySelectorAll(".workbench, .facts-of-lesson")) part.inert = now;
}

function startOver(step) {
  photos.forEach(({bitmap}) => bitmap.close());
  photos = [];
  at = -1;
  outline = null;
  find("#class-name").value = "";
  find("#base").value = step;
  say(null);
  render();
}

export function listenForTeaching(about, done, stepOf) {
  limits = about.lesson;
  onDone = done;
  find("#class-name").maxLength = limits.name;
  const add = find("#add"), mask = find("#load-mask");
  add.accept = about.types.join(",");
  add.addEventListener("change", async () => {
    await addPhotos([...add.files]);
    add.value = "";
  });
  mask.addEventListener("change", async () => {
    await loadMask(mask.files[0]);
    mask.value = "";
  });
  const canvas = board();
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", giveUp);
  canvas.addEventListener("pointerleave", () => at >= 0 && !stroke && drawGuide());
  canvas.addEventListener("dblclick", closeOutline);
  for (const each of view().querySelectorAll("[name='tool']")) {
    each.addEventListener("change", () => {
      outline = null;
      render();
    });
  }
  find("#undo").addEventListener("click", undo);
  find("#clear").addEventListener("click", () => {
    photos[at].done.push({kind: "clear"});
    outline = null;
    render();
  });
  find("#close-outline").addEventListener("click", closeOutline);
  find("#class-name").addEventListener("input", render);
  find("#teach-now").addEventListener("click", () => teach(about.types));
  find("#stop").addEventListener("click", () => busy?.abort());
  find("#start-over").addEventListener("click", () => startOver(stepOf(model.index)));
  find("#back").addEventListener("click", closeTeaching);
  document.addEventListener("keydown", (event) => {
    if (!isTeaching() || event.target.matches("input[type='text']")) return;
    if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
    else if (event.key === "Escape" && outline) [outline, stroke] = [null, null];
    else if (event.key === "Enter" && outline) closeOutline();
    else return;
    event.preventDefault();
    render();
  });
}

export {addPhotos};
