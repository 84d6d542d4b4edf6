// The demo's page. An image is sent to the server once for each model. Sliders, check boxes and the pointer work on the
// planes in the answer, without another request.

import {addPhotos, closeTeaching, isTeaching, listenForTeaching, openTeaching} from "/teach.js";

const MOST_TRIES = 5; // when the server is busy
const TOP = 5; // classes in the readout
const NAMED_SHARE = 0.006; // of the image: smaller regions get no name on the mask
const MOST_NAMES = 12;

const find = (selector, root = document) => root.querySelector(selector);

const state = {
  image: null, // {blob, name}
  opened: 0, // number of images requested so far: only the latest is shown
  own: true,
  threshold: 0.5,
  opacity: 0.55,
  off: new Set(), // names of classes
  chosen: null, // name of the class whose probability is shown, once the user has chosen one
  at: null, // {x, y}, shares of width and height
};
let about;
let viridis; // Uint32Array of 256 pixels
let cards = [];
const touch = matchMedia("(pointer: coarse)"); // only texts depend on it

const pixel = (red, green, blue) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
const css = (colour) => `rgb(${colour.join(" ")})`;
const stepOf = (card) => Number(find(".step select", card.element).value);

// ---------- answers of the server

async function ask(card, signal) {
  const query = `/predict?model=${card.index}&step=${stepOf(card)}`;
  for (let attempt = 1; ; attempt++) {
    const response = await fetch(query, {
      method: "POST", body: state.image.blob, headers: {"Content-Type": state.image.blob.type}, signal,
    });
    if (response.ok) return decode(await response.arrayBuffer());
    if (response.status === 503 && attempt < MOST_TRIES) {
      await new Promise((done) => setTimeout(done, 1000 * Number(response.headers.get("Retry-After") ?? 1)));
      continue;
    }
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error ?? `the server answered ${response.status}`);
  }
}

function decode(buffer) {
  const headLength = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headLength)));
  const size = head.width * head.height;
  let place = 4 + headLength;
  const take = (bytes) => new Uint8Array(buffer, (place += bytes) - bytes, bytes);
  const u = new Uint16Array(buffer, place, size);
  place += 2 * size;
  const image = take(3 * size), labels = take(size), strongest = take(size);
  const counts = new Array(head.classes.length).fill(0);
  for (const label of labels) counts[label]++;
  return {
    ...head, size, u, image, labels, strongest, probabilities: head.classes.map(() => take(size)),
    found: new Map(head.classes.map((name, label) => [name, counts[label]]).filter(([, count]) => count > 0)),
  };
}

async function predict(card) {
  card.abort?.abort();
  card.abort = new AbortController();
  const {signal} = card.abort;
  card.element.setAttribute("aria-busy", "true");
  try {
    const result = await ask(card, signal);
    if (signal.aborted) return;
    card.result = result;
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    card.result = null;
    show(error instanceof TypeError ? "The server does not answer; is it still running?" : `${error.message}.`);
  }
  card.element.removeAttribute("aria-busy");
  renderAll();
}

function show(message) {
  const line = find("#message");
  line.hidden = !message;
  line.textContent = message ? message[0].toUpperCase() + message.slice(1) : "";
}

function open(blob, name) {
  if (!about.types.includes(blob.type)) {
    show(`${name} is ${blob.type || "of an unknown type"}; allowed are ${kinds()}.`);
  } else if (blob.size > about.upload_bytes) {
    show(`${name} has ${megabytes(blob.size)} MB; the limit is ${megabytes(about.upload_bytes)} MB.`);
  } else {
    state.image = {blob, name};
    state.at = null;
    show(null);
    cards.forEach(predict);
  }
}

const kinds = () => about.types.map((type) => type.split("/")[1].toUpperCase()).join(", ");
const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0);

// ---------- decisions

/** Return the shown label of each pixel, and the number of pixels of each label. */
function decide(result) {
  const {labels, strongest, u, size, classes} = result;
  const shown = Uint8Array.from(classes, (name, label) => (state.off.has(name) ? 0 : label));
  const limit = state.threshold * 65535;
  const mask = new Uint8Array(size);
  const counts = new Array(classes.length).fill(0);
  for (let i = 0; i < size; i++) {
    const label = shown[state.own ? labels[i] : u[i] > limit ? 0 : strongest[i]];
    mask[i] = label;
    counts[label]++;
  }
  return {mask, counts};
}

/** Return all classes of the models in view, background first: name → colour, that of the first model with the class. */
function knownClasses() {
  const known = new Map();
  for (const {result} of cards) {
    result?.classes.forEach((name, label) => known.has(name) || known.set(name, result.colours[label]));
  }
  return known;
}

/** Return the largest share of the image that each class has in any model, by the methods' own decisions. */
function foundPixels() {
  const found = new Map();
  for (const {result} of cards) {
    result?.found.forEach((count, name) => found.set(name, Math.max(count / result.size, found.get(name) ?? 0)));
  }
  return found;
}

function chosenClass() {
  if (state.chosen !== null) return state.chosen;
  const first = cards.find((card) => card.result);
  if (!first) return null;
  const counts = first.decided.counts.slice(1);
  return first.result.classes[1 + counts.indexOf(Math.max(...counts))];
}

// ---------- pictures

function canvasOf(card, panel, result) {
  const frame = find(`.${panel} .frame`, card.element);
  const canvas = find("canvas", frame);
  frame.classList.toggle("empty", !result);
  frame.classList.toggle("small", result !== null && Math.max(result.width, result.height) < 160);
  if (!result) {
    canvas.width = canvas.height = 1;
    return null;
  }
  frame.style.setProperty("--ratio", result.width / result.height);
  if (canvas.width !== result.width || canvas.height !== result.height) {
    canvas.width = result.width;
    canvas.height = result.height;
  }
  return canvas.getContext("2d");
}

function paint(context, result, colourAt) {
  const picture = context.createImageData(result.width, result.height);
  const pixels = new Uint32Array(picture.data.buffer);
  for (let i = 0; i < result.size; i++) pixels[i] = colourAt(i);
  context.putImageData(picture, 0, 0);
}

/** Return whether a pixel is beside one with another value. */
function isEdge(values, i, width, size) {
  const value = values[i];
  const column = i % width;
  return (column > 0 && values[i - 1] !== value) || (column < width - 1 && values[i + 1] !== value) ||
    (i >= width && values[i - width] !== value) || (i < size - width && values[i + width] !== value);
}

function renderMask(card, colours) {
  const {result} = card;
  const context = canvasOf(card, "mask", result);
  const names = find(".names", card.element);
  names.replaceChildren();
  if (!context) return;
  const {mask, counts} = card.decided;
  const {image, width, size} = result;
  const table = result.classes.map((name) => colours.get(name));
  const strength = state.opacity;
  paint(context, result, (i) => {
    const red = image[3 * i], green = image[3 * i + 1], blue = image[3 * i + 2];
    const label = mask[i];
    if (label === 0 || strength === 0) return pixel(red, green, blue);
    const colour = table[label];
    const share = isEdge(mask, i, width, size) ? Math.min(1, strength + 0.4) : strength;
    return pixel(
      red + (colour[0] - red) * share, green + (colour[1] - green) * share, blue + (colour[2] - blue) * share,
    );
  });
  for (const {label, x, y} of strength > 0 ? placesOfNames(mask, result) : []) {
    const span = part("", result.classes[label]);
    span.style.left = `${100 * Math.min(0.92, Math.max(0.08, x))}%`; // not cut at the image's border
    span.style.top = `${100 * Math.min(0.97, Math.max(0.03, y))}%`;
    names.append(span);
  }
  const shown = result.classes.flatMap((name, label) =>
    label > 0 && counts[label] > 0 ? [`${name} ${percent(counts[label] / size)}`] : []);
  find(".mask canvas", card.element).setAttribute(
    "aria-label", `Mask over ${state.image.name}: ${shown.join(", ") || "background only"}. Arrow keys read pixels.`,
  );
}

/** Return the places of names: for each large region, a wide run of its pixels near its middle row. */
function placesOfNames(mask, {width, height, size}) {
  const places = regions(mask, width, height).filter((runs) => area(runs) > NAMED_SHARE * size);
  places.sort((one, other) => area(other) - area(one));
  return places.slice(0, MOST_NAMES).map((runs) => {
    const middle = runs.reduce((sum, run) => sum + run.y * run.length, 0) / area(runs);
    const widest = Math.max(...runs.map((run) => run.length));
    const wide = runs.filter((run) => run.length >= 0.6 * widest);
    const run = wide.reduce((best, each) => (Math.abs(each.y - middle) < Math.abs(best.y - middle) ? each : best));
    return {label: run.label, x: (run.start + run.length / 2) / width, y: (run.y + 0.5) / height};
  });
}

const area = (runs) => runs.reduce((sum, run) => sum + run.length, 0);

/** Return the connected areas of each label but background, each as a list of horizontal runs. */
function regions(mask, width, height) {
  let above = [];
  const all = new Set();
  for (let y = 0; y < height; y++) {
    const row = [];
    for (let start = 0, x = 1; x <= width; x++) {
      const label = mask[y * width + start];
      if (x < width && mask[y * width + x] === label) continue;
      if (label > 0) row.push({label, y, start, length: x - start});
      start = x;
    }
    for (const run of row) {
      run.region = {runs: [run]};
      all.add(run.region);
      for (const other of above) {
        const touches = other.start < run.start + run.length && run.start < other.start + other.length;
        if (touches && other.label === run.label) join(run, other, all);
      }
    }
    above = row;
  }
  return [...all].map((region) => region.runs);
}

/** Join the regions of two runs: add the smaller one to the larger one. */
function join(one, other, all) {
  if (one.region === other.region) return;
  const [small, large] = [one.region, other.region].sort((a, b) => a.runs.length - b.runs.length);
  for (const run of small.runs) {
    run.region = large;
    large.runs.push(run);
  }
  all.delete(small);
}

function renderUncertainty(card) {
  const {result} = card;
  const context = canvasOf(card, "uncertainty", result);
  find(".meaning", card.element).textContent =
    !result ? "" : result.u_is_background ? "u is P(background)" : "u is the method’s own measure";
  if (!context) return;
  const {u, width, size} = result;
  if (state.own) {
    paint(context, result, (i) => viridis[u[i] >> 8]);
    return;
  }
  const limit = state.threshold * 65535;
  const above = Uint8Array.from(u, (value) => Number(value > limit));
  const white = pixel(255, 255, 255);
  paint(context, result, (i) => (above[i] === 0 && isEdge(above, i, width, size) ? white : viridis[u[i] >> 8]));
}

function renderProbability(card, name) {
  const {result} = card;
  const select = find(".probability select", card.element);
  const frame = find(".probability .frame", card.element);
  if (!result) {
    canvasOf(card, "probability", null);
    select.replaceChildren();
    return;
  }
  const label = result.classes.indexOf(name);
  const options = result.classes.map((each) => new Option(each));
  if (label < 0 && name !== null) options.push(new Option(name));
  select.replaceChildren(...options);
  select.value = name;
  frame.dataset.empty = `This step does not know “${name}”.`;
  const context = canvasOf(card, "probability", label < 0 ? null : result);
  if (context) {
    const plane = result.probabilities[label];
    paint(context, result, (i) => viridis[plane[i]]);
  } else {
    frame.style.setProperty("--ratio", result.width / result.height);
  }
}

// ---------- the pixel under the pointer

function renderPixel() {
  const colours = knownClasses();
  for (const card of cards) {
    const {result, element} = card;
    const where = find(".where", element);
    const list = find(".readout ol", element);
    element.querySelectorAll(".cross").forEach((cross) => cross.remove());
    list.replaceChildren();
    if (!result || !state.at) {
      where.textContent = !result ? "" : touch.matches
        ? "Tap the image for the numbers of a pixel."
        : "Point at the image, or press arrow keys on the mask, for the numbers of a pixel.";
      continue;
    }
    const x = Math.min(result.width - 1, Math.floor(state.at.x * result.width));
    const y = Math.min(result.height - 1, Math.floor(state.at.y * result.height));
    const i = y * result.width + x;
    for (const frame of element.querySelectorAll(".frame:not(.empty)")) {
      const cross = document.createElement("div");
      cross.className = "cross";
      cross.style.left = `${100 * (x + 0.5) / result.width}%`;
      cross.style.top = `${100 * (y + 0.5) / result.height}%`;
      frame.append(cross);
    }
    const [fullWidth, fullHeight] = result.image_size;
    const fullX = Math.floor((x + 0.5) * fullWidth / result.width);
    const fullY = Math.floor((y + 0.5) * fullHeight / result.height);
    const label = result.classes[card.decided.mask[i]];
    const strong = document.createElement("strong");
    strong.textContent = label;
    where.replaceChildren(
      `x ${fullX}, y ${fullY}: `, strong, `, u = ${(result.u[i] / 65535).toFixed(3)}`,
    );
    const ranked = result.probabilities.map((plane, k) => [plane[i] / 255, k]);
    if (result.u_is_background) ranked[0][0] = result.u[i] / 65535; // the same number, finer
    ranked.sort((one, other) => other[0] - one[0] || one[1] - other[1]);
    for (const [value, k] of ranked.slice(0, TOP).filter(([value]) => value >= 0.005)) {
      const row = document.createElement("li");
      row.append(
        swatch(colours.get(result.classes[k])), part("name", result.classes[k]), part("bar", ""),
        part("value", value.toFixed(2)),
      );
      const bar = document.createElement("div");
      bar.style.width = `${100 * value}%`;
      find(".bar", row).append(bar);
      list.append(row);
    }
  }
}

function part(name, text) {
  const span = document.createElement("span");
  span.className = name;
  span.textContent = text;
  return span;
}

function swatch(colour) {
  const span = part("swatch", "");
  span.style.backgroundColor = css(colour);
  return span;
}

function pointAt(event) {
  const canvas = event.currentTarget;
  if (!cards.some((card) => card.result)) return;
  const box = canvas.getBoundingClientRect();
  const inside = (value) => Math.min(0.999999, Math.max(0, value));
  state.at = {x: inside((event.clientX - box.left) / box.width), y: inside((event.clientY - box.top) / box.height)};
  schedulePixel();
}

function moveByKey(event, card) {
  const {result} = card;
  if (!result) return;
  if (event.key === "Escape") {
    state.at = null;
    schedulePixel();
    return;
  }
  const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  if (!(event.key in moves)) return;
  event.preventDefault();
  const far = event.shiftKey ? 10 : 1;
  const [dx, dy] = moves[event.key];
  const at = state.at ?? {x: 0.5, y: 0.5};
  const moved = (share, by, length) =>
    (Math.min(length - 1, Math.max(0, Math.floor(share * length) + by * far)) + 0.5) / length;
  state.at = {x: moved(at.x, dx, result.width), y: moved(at.y, dy, result.height)};
  schedulePixel();
}

/** Show the probability of the class that was clicked. */
function choosePixel(card) {
  const {result} = card;
  if (!result || !state.at) return;
  const x = Math.floor(state.at.x * result.width), y = Math.floor(state.at.y * result.height);
  state.chosen = result.classes[card.decided.mask[y * result.width + x]];
  schedule();
}

// ---------- the list of classes

function percent(share) {
  if (share === 0) return "–";
  return share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function renderClasses(colours) {
  const list = find("#classes");
  // Classes in the image first, largest on top, by the methods' own decision: so the order does not change while sliding.
  const found = foundPixels();
  const names = [...colours.keys()].slice(1).sort((one, other) => (found.get(other) ?? 0) - (found.get(one) ?? 0));
  const number = names.filter((name) => found.has(name)).length;
  if (list.dataset.names !== JSON.stringify([number, ...names])) {
    list.dataset.names = JSON.stringify([number, ...names]);
    const items = names.map((name, place) => {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.addEventListener("change", () => {
        box.checked ? state.off.delete(name) : state.off.add(name);
        schedule();
      });
      label.append(box, swatch(colours.get(name)), part("name", name), part("share", ""));
      label.title = name;
      const item = document.createElement("li");
      item.dataset.name = name;
      item.className = place < number ? "seen" : "unseen";
      item.append(label);
      return item;
    });
    const divider = document.createElement("li");
    divider.className = "divider quiet";
    divider.textContent = number ? "Not in this image" : "Not found in this image";
    list.replaceChildren(...items.slice(0, number), ...(number < items.length ? [divider] : []), ...items.slice(number));
  }
  for (const item of list.querySelectorAll("[data-name]")) {
    const {name} = item.dataset;
    const shares = cards.filter((card) => card.result).map((card) => {
      const label = card.result.classes.indexOf(name);
      return label < 0 ? 0 : card.decided.counts[label] / card.result.size;
    });
    find("input", item).checked = !state.off.has(name);
    const absent = shares.every((share) => share === 0);
    find(".share", item).textContent = absent && item.className.includes("unseen") ? "" : shares.map(percent).join(" · ");
    item.classList.toggle("absent", absent);
  }
}

// ---------- everything, at most once a frame

function renderAll() {
  for (const card of cards) {
    card.decided = card.result && decide(card.result);
    find(".download", card.element).disabled = !card.result;
    const facts = find(".facts", card.element);
    const {method, task} = about.models[card.index];
    const known = card.result ? `, ${card.result.classes.length - 1} classes, ${card.result.seconds.toFixed(2)} s` : "";
    facts.textContent = `${method}${task && `, ${task}`}${known}`;
  }
  const colours = knownClasses();
  const name = chosenClass();
  for (const card of cards) {
    renderMask(card, colours);
    renderUncertainty(card);
    renderProbability(card, name);
  }
  renderClasses(colours);
  renderPixel();
}

function onceAFrame(render) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      render();
    });
  };
}
const schedule = onceAFrame(renderAll);
const schedulePixel = onceAFrame(renderPixel);

// ---------- the mask as a file

/** Return the shown mask at the image's own size: an indexed PNG whose pixels are the dataset's class ids. */
async function maskFile({result, decided}) {
  const [width, height] = result.image_size;
  const rows = new Uint8Array((width + 1) * height); // each row begins with its filter, 0 for none
  for (let y = 0; y < height; y++) {
    const from = Math.floor((y + 0.5) * result.height / height) * result.width;
    const to = y * (width + 1) + 1;
    for (let x = 0; x < width; x++) {
      rows[to + x] = result.ids[decided.mask[from + Math.floor((x + 0.5) * result.width / width)]];
    }
  }
  const palette = new Uint8Array(3 * 256);
  result.ids.forEach((id, label) => palette.set(result.colours[label], 3 * id));
  const header = new DataView(new ArrayBuffer(13));
  header.setUint32(0, width);
  header.setUint32(4, height);
  header.setUint8(8, 8); // bits
  header.setUint8(9, 3); // indexed
  const packed = new Blob([rows]).stream().pipeThrough(new CompressionStream("deflate"));
  const data = new Uint8Array(await new Response(packed).arrayBuffer());
  const signature = Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10);
  const chunks = [["IHDR", new Uint8Array(header.buffer)], ["PLTE", palette], ["IDAT", data], ["IEND", new Uint8Array()]];
  return new Blob([signature, ...chunks.map(([kind, content]) => chunk(kind, content))], {type: "image/png"});
}

function chunk(kind, content) {
  const bytes = new Uint8Array(12 + content.length);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, content.length);
  bytes.set(new TextEncoder().encode(kind), 4);
  bytes.set(content, 8);
  view.setUint32(8 + content.length, crc(bytes.subarray(4, 8 + content.length)));
  return bytes;
}

const crcTable = Uint32Array.from({length: 256}, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

function crc(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = crcTable[(value ^ byte) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}

async function save(card) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await maskFile(card));
  const stem = state.image.name.replace(/\.[^.]*$/, "");
  const model = cards.length > 1 ? `_${card.index + 1}` : "";
  link.download = `${stem}${model}_mask.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---------- the page

const stepLabel = ({step, new: added, taught}) => {
  const names = added.length > 3 ? `${added.slice(0, 2).join(", ")} and ${added.length - 2} more` : added.join(", ");
  return `${step}: ${step ? "+ " : ""}${names}${taught ? " (taught here)" : ""}`;
};

/** Fill the selector of a card with the steps of its model, and choose one. */
function offerSteps(card, chosen) {
  const select = find(".step select", card.element);
  const {steps} = about.models[card.index];
  select.replaceChildren(...steps.map((each) => new Option(stepLabel(each), each.step)));
  select.value = chosen ?? steps.at(-1).step;
  find(".step", card.element).classList.toggle("single", steps.length === 1);
  showStep(card);
}

/** Show what the chosen step allows: the steps before and after, teaching, saving. */
function showStep(card) {
  const {element} = card, select = find(".step select", element);
  const {taught, cannot_learn: cannot} = about.models[card.index].steps[select.selectedIndex];
  find(".before", element).disabled = select.selectedIndex === 0;
  find(".after", element).disabled = select.selectedIndex === select.length - 1;
  find(".teach", element).hidden = Boolean(cannot);
  find(".cannot", element).hidden = !cannot;
  find(".cannot", element).textContent = cannot;
  const save = find(".save-model", element);
  save.hidden = !taught;
  if (taught) savesModel(save, card.index, stepOf(card));
}

function savesModel(link, index, step) {
  const names = about.models[index].steps.find((each) => each.step === step).new.join("+");
  link.href = `/taught.safetensors?model=${index}&step=${step}`;
  link.download = `${about.models[index].name}+${names}`.replace(/[^\p{L}\p{N}+._-]/gu, "_") + ".safetensors";
}

function chooseStep(card) {
  show(null);
  find("#learnt").hidden = true;
  showStep(card);
  if (state.image) predict(card);
}

function moveStep(card, by) {
  find(".step select", card.element).selectedIndex += by;
  chooseStep(card);
}

function teachCard(card) {
  const {name, steps} = about.models[card.index];
  const labelled = steps.map((each) => ({...each, label: stepLabel(each)}));
  openTeaching({index: card.index, name, steps: labelled}, stepOf(card), state.image);
}

/** After a lesson, choose the new step, show its prediction of the image in view, and offer to save it. */
async function learnt(lesson, photograph) {
  about.models = (await (await fetch("/about.json")).json()).models;
  const card = cards[lesson.model];
  cards.forEach((each) => offerSteps(each, each === card ? lesson.step : stepOf(each)));
  closeTeaching();
  show(null);
  const line = find("#learnt");
  find("p", line).textContent = inWords(lesson);
  savesModel(find("a", line), lesson.model, lesson.step);
  line.hidden = false;
  find("#more").onclick = () => teachCard(card);
  state.chosen = lesson.name;
  window.scrollTo(0, 0);
  if (state.image) predict(card);
  else open(photograph.blob, photograph.name);
}

function inWords({name, marked, held_back: heldBack, seconds, unchanged, iou, predicted, improved}) {
  const photographs = `${marked} marked photograph${marked === 1 ? "" : "s"}`;
  const lines = [`${improved ? "Improved" : "Learnt"} “${name}” from ${photographs} in ${seconds.toFixed(0)} s.`];
  const where = heldBack ? `On ${heldBack} of them, held back to test,` : "There";
  if (!predicted) lines.push(`${where} the model does not find it yet: add photographs, or mark it more exactly.`);
  else if (iou !== null) lines.push(`${where} its IoU with your mask${marked === 1 ? "" : "s"} is ${iou.toFixed(0)}\u00a0%.`);
  if (unchanged !== null) lines.push(`Old classes: ${unchanged.toFixed(1)}\u00a0% of their pixels are labelled as before.`);
  return lines.join(" ");
}

function buildCard(model, index) {
  const element = find("#card").content.firstElementChild.cloneNode(true);
  const card = {index, element, result: null, decided: null, abort: null};
  find("h2", element).textContent = model.name;
  offerSteps(card);
  find(".step select", element).addEventListener("change", () => chooseStep(card));
  find(".before", element).addEventListener("click", () => moveStep(card, -1));
  find(".after", element).addEventListener("click", () => moveStep(card, 1));
  find(".teach", element).addEventListener("click", () => teachCard(card));
  find(".download", element).addEventListener("click", () => save(card));
  find(".probability select", element).addEventListener("change", (event) => {
    state.chosen = event.target.value;
    schedule();
  });
  const frame = find(".mask .frame", element);
  frame.dataset.empty = "Choose an image to begin.";
  frame.addEventListener("click", () => state.image || find("#file").click());
  for (const canvas of element.querySelectorAll(".frame canvas")) {
    canvas.addEventListener("pointermove", pointAt);
    canvas.addEventListener("pointerdown", pointAt);
    canvas.addEventListener("click", () => choosePixel(card));
  }
  find(".mask canvas", element).addEventListener("keydown", (event) => moveByKey(event, card));
  for (const scale of element.querySelectorAll(".scale canvas")) {
    const context = scale.getContext("2d");
    const picture = context.createImageData(256, 1);
    new Uint32Array(picture.data.buffer).set(viridis);
    context.putImageData(picture, 0, 0);
  }
  return card;
}

function buildSample(address, index) {
  const name = address.split("/").pop(), button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  const image = document.createElement("img");
  image.src = address;
  image.alt = `Sample ${index + 1}`;
  image.title = name;
  button.append(image);
  button.addEventListener("click", async () => {
    const mine = ++state.opened;
    const sample = await (await fetch(address)).blob();
    if (mine !== state.opened) return; // the user has chosen another image meanwhile
    open(sample, name);
    pressSample(button);
  });
  return button;
}

function pressSample(pressed) {
  for (const button of find("#samples").children) button.setAttribute("aria-pressed", String(button === pressed));
}

function openFiles(files) {
  if (files.length === 0) return;
  if (isTeaching()) {
    addPhotos([...files]);
    return;
  }
  find("#learnt").hidden = true;
  state.opened++;
  pressSample(null);
  open(files[0], files[0].name || "the pasted image");
}

function listen() {
  const own = find("#own"), threshold = find("#threshold"), opacity = find("#opacity");
  own.addEventListener("change", () => {
    state.own = own.checked;
    schedule();
  });
  threshold.addEventListener("input", () => {
    state.threshold = Number(threshold.value);
    state.own = own.checked = false;
    find("#threshold-value").textContent = state.threshold.toFixed(2);
    schedule();
  });
  opacity.addEventListener("input", () => {
    state.opacity = Number(opacity.value) / 100;
    find("#opacity-value").textContent = opacity.value;
    schedule();
  });
  find("#all").addEventListener("click", () => {
    state.off.clear();
    schedule();
  });
  find("#none").addEventListener("click", () => {
    state.off = new Set([...knownClasses().keys()].slice(1));
    schedule();
  });
  const file = find("#file");
  file.addEventListener("change", () => {
    openFiles(file.files);
    file.value = ""; // the same file may be chosen again
  });
  document.addEventListener("paste", (event) => openFiles(event.clipboardData.files));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dragging"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    openFiles(event.dataTransfer.files);
  });
}

async function start() {
  about = await (await fetch("/about.json")).json();
  viridis = Uint32Array.from(about.viridis, (colour) => pixel(...colour));
  const datasets = [...new Set(about.models.map((model) => model.dataset).filter(Boolean))];
  find("#task").textContent = datasets.join(" and ");
  find("#limits").textContent = `${kinds()}, up to ${megabytes(about.upload_bytes)} MB`;
  find("#file").accept = about.types.join(",");
  cards = about.models.map(buildCard);
  find("#cards").replaceChildren(...cards.map((card) => card.element));
  find("#samples").replaceChildren(...about.samples.map(buildSample));
  if (cards.length > 1) find("#shares").textContent = "Percent of the image, first and second model.";
  listen();
  listenForTeaching(about, learnt, (index) => stepOf(cards[index]));
  renderAll();
  const early = find("#file"); // chosen before the page was listening
  if (early.files.length > 0) early.dispatchEvent(new Event("change"));
  else find("#samples button")?.click(); // something to see at once
}

start().catch((error) => show(`the page could not start: ${error.message}.`));
