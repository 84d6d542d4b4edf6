"""The demo's page in a real browser: what users do with it, and that nothing leaves the machine."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, until
from demo_runs import STEPS, random_run, small_analytic_run
from PIL import Image
from test_demo import serving

from incseg.demo.models import Models
from incseg.demo.server import DemoServer
from incseg.inference import Predictor, Result, load
from incseg.report.draw import viridis

READY = (
    "return document.querySelector('.mask .frame') && !document.querySelector('[aria-busy]') "
    "&& !document.querySelector('.mask .frame.empty')"
)
SIZE = (72, 54)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    path = tmp_path_factory.mktemp("photo") / "my photo.png"
    small.resize(SIZE, Image.Resampling.BICUBIC).save(path)
    return path


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> list[Predictor]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [random_run(folder / "ours"), random_run(folder / "rival", "finetune", seed=5)]
    return [load(run, device="cpu") for run in runs]


@pytest.fixture(scope="module")
def server(predictors: list[Predictor]) -> Iterator[DemoServer]:
    runs = [Path(predictor.info["file"]).parents[2] for predictor in predictors]
    server = DemoServer(Models(runs, "cpu"), port=0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def window(downloads: Path) -> Iterator[Browser]:
    browser = Browser(downloads)
    yield browser
    browser.close()


@pytest.fixture
def page(window: Browser, server: DemoServer, photo: Path) -> Iterator[Browser]:
    """Open the page with the photograph in both models. Afterwards require that there are no errors and no foreign
    requests."""
    window.open(server.url)
    window.wait(READY)  # the first sample
    window.type("#file", str(photo))
    window.wait(f"{READY} && document.querySelector('.mask canvas').width === {SIZE[0]}")
    yield window
    assert window.console() == []
    requests = window.requests()
    assert any("/predict" in url for url in requests)
    assert [url for url in requests if not url.startswith(server.url)] == []


def pixels(page: Browser, selector: str, card: int = 0) -> np.ndarray:
    """Return the (H, W, 3) pixels of a canvas."""
    url = page.run("return document.querySelectorAll(arguments[0])[arguments[1]].toDataURL()", selector, card)
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as drawn:
        return np.asarray(drawn.convert("RGB"))


def set_slider(page: Browser, selector: str, value: float) -> None:
    page.run(
        "const slider = document.querySelector(arguments[0]); slider.value = arguments[1];"
        "slider.dispatchEvent(new Event('input'))",
        selector,
        value,
    )
    next_frame(page)


def next_frame(page: Browser) -> None:
    """Wait until the page has drawn all changes."""
    page.run("delete window.drawn; requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = 1; }))")
    page.wait("return window.drawn")


def shown_labels(page: Browser, result: Result, card: int = 0) -> np.ndarray:
    """Return the labels, decoded from the colours of the mask drawn without the image."""
    set_slider(page, "#opacity", 100)
    drawn = pixels(page, ".mask canvas", card).astype(int)
    palette = result.palette.astype(int)
    nearest = ((drawn[:, :, None] - palette[None, None]) ** 2).sum(-1).argmin(-1)
    photo = (drawn == np.asarray(result.image)).all(-1)  # background is left clear
    return np.where(photo, 0, nearest)


def expected(result: Result, threshold: float) -> np.ndarray:
    """Return the labels by the rule of the slider, written independently."""
    probabilities = result.probabilities
    assert probabilities is not None
    u_is_background = np.array_equal(result.uncertainty, probabilities[0])
    strongest = probabilities[1:].argmax(0) + 1 if u_is_background else probabilities.argmax(0)
    return np.where(result.uncertainty > threshold, 0, strongest)


@pytest.fixture(scope="module")
def results(predictors: list[Predictor], photo: Path) -> list[Result]:
    return [predictor.predict(photo, probabilities=True) for predictor in predictors]


def test_page_begins_with_a_sample(window: Browser, server: DemoServer) -> None:
    window.open(server.url)
    window.wait(READY)
    assert window.run("return document.querySelectorAll('#samples img').length") == 6
    assert window.run("return document.querySelector('#samples button').getAttribute('aria-pressed')") == "true"
    assert window.run("return [...document.querySelectorAll('.card h2')].map((h) => h.textContent)") == [
        "ours",
        "rival",
    ]
    assert window.console() == []


@pytest.mark.parametrize("late", ["/about.json", "/samples/"])
def test_an_image_chosen_early_is_the_one_shown(window: Browser, server: DemoServer, photo: Path, late: str) -> None:
    """Also if the page was not ready yet, or a sample is still loading."""
    slow = (
        "const fetchAtOnce = window.fetch; window.fetch = async (address, ...rest) => {"
        f" if (String(address).startsWith('{late}')) await new Promise((done) => setTimeout(done, 700));"
        " const answer = await fetchAtOnce(address, ...rest); window.came = String(address); return answer; }"
    )
    added = window.run_command("Page.addScriptToEvaluateOnNewDocument", source=slow)
    try:
        window.open(server.url)
        if late != "/about.json":
            window.wait("return document.querySelector('.mask .frame')")
        window.type("#file", str(photo))
        window.wait(f"{READY} && document.querySelector('.mask canvas').width === {SIZE[0]}")
        window.run("const since = performance.now(); window.waited = () => performance.now() - since > 1000")
        window.wait("return window.waited()")
        assert window.run("return document.querySelector('.mask canvas').width") == SIZE[0]
        assert window.run("return document.querySelectorAll('#samples [aria-pressed=true]').length") == 0
    finally:
        window.run_command("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    window.requests()


@pytest.mark.parametrize("card", [0, 1])
def test_masks_of_both_models_are_their_own_decision(page: Browser, results: list[Result], card: int) -> None:
    np.testing.assert_array_equal(shown_labels(page, results[card], card), results[card].labels)


def test_maps_are_viridis_of_u_and_of_the_chosen_class(page: Browser, results: list[Result]) -> None:
    result = results[0]
    assert result.probabilities is not None
    level = np.rint(result.uncertainty * 65535).astype(int) >> 8
    np.testing.assert_array_equal(pixels(page, ".uncertainty .frame canvas"), viridis()[level])
    page.run(
        "const select = document.querySelector('.probability select'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('change'))",
        "ring",
    )
    next_frame(page)
    level = np.rint(result.probabilities[result.classes.index("ring")] * 255).astype(int)
    np.testing.assert_array_equal(pixels(page, ".probability .frame canvas"), viridis()[level])
    assert page.run("return document.querySelectorAll('.probability select')[1].value") == "ring"  # one for both


@pytest.mark.parametrize("card", [0, 1])
def test_slider_moves_the_decision(page: Browser, results: list[Result], card: int) -> None:
    seen = []
    for threshold in (0.1, 0.4, 0.9):
        set_slider(page, "#threshold", threshold)
        shown = shown_labels(page, results[card], card)
        assert np.mean(shown == expected(results[card], threshold)) > 0.999  # u is sent with 16 bits
        seen.append(np.mean(shown > 0))
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    assert not page.run("return document.querySelector('#own').checked")
    page.click("#own")
    next_frame(page)
    np.testing.assert_array_equal(shown_labels(page, results[card], card), results[card].labels)


def test_slider_by_keyboard(page: Browser) -> None:
    page.type("#threshold", "\ue014" * 3)  # arrow right
    assert page.text("#threshold-value") == "0.53"


def test_a_class_that_is_off_is_background(page: Browser, results: list[Result]) -> None:
    result = results[0]
    label = int(np.bincount(result.labels.ravel())[1:].argmax()) + 1
    page.click(f"#classes li[data-name='{result.classes[label]}'] input")
    next_frame(page)
    np.testing.assert_array_equal(shown_labels(page, result), np.where(result.labels == label, 0, result.labels))
    page.click("#none")
    next_frame(page)
    assert not shown_labels(page, result).any()
    page.click("#all")
    next_frame(page)
    np.testing.assert_array_equal(shown_labels(page, result), result.labels)


def test_hover_shows_the_numbers_of_both_models(page: Browser, results: list[Result]) -> None:
    page.hover(".mask canvas", 0.3, 0.6)
    page.wait("return document.querySelectorAll('.cross').length === 6")
    for card, result in enumerate(results):
        assert result.probabilities is not None
        text = page.run("return document.querySelectorAll('.readout .where')[arguments[0]].textContent", card)
        x, y = (int(word.strip(",:")) for word in (text.split()[1], text.split()[3]))
        assert abs(x - 0.3 * SIZE[0]) <= 1
        assert abs(y - 0.6 * SIZE[1]) <= 1
        assert f": {result.classes[result.labels[y, x]]}, u = {result.uncertainty[y, x]:.3f}" in text
        rows = page.run(
            "return [...document.querySelectorAll('.readout')[arguments[0]].querySelectorAll('li')]"
            ".map((row) => [row.querySelector('.name').textContent, Number(row.querySelector('.value').textContent)])",
            card,
        )
        assert rows[0][0] == result.classes[int(result.probabilities[:, y, x].argmax())]
        for name, value in rows:
            assert abs(value - result.probabilities[result.classes.index(name), y, x]) < 0.0101


def test_pixels_by_keyboard(page: Browser) -> None:
    page.type(".mask canvas", "\ue014\ue015")  # right, down: from the middle
    next_frame(page)
    assert page.text(".readout .where").startswith(f"x {SIZE[0] // 2 + 1}, y {SIZE[1] // 2 + 1}: ")


@pytest.mark.parametrize("card", [0, 1])
def test_saved_mask_is_what_predict_writes(page: Browser, results: list[Result], downloads: Path, card: int) -> None:
    file = downloads / f"my photo_{card + 1}_mask.png"
    page.run("document.querySelectorAll('.download')[arguments[0]].click()", card)
    until(file.exists, f"{file.name} is saved")
    with Image.open(file) as mask:
        assert (mask.mode, mask.size) == ("P", SIZE)
        np.testing.assert_array_equal(np.asarray(mask), results[card].ids)
        colours = np.array(mask.getpalette()).reshape(-1, 3)
    np.testing.assert_array_equal(colours[list(results[card].class_ids)], results[card].palette)
    file.unlink()


def test_saved_mask_follows_slider_and_classes(page: Browser, results: list[Result], downloads: Path) -> None:
    set_slider(page, "#threshold", 0.95)
    page.click("#classes li[data-name='disc'] input")
    next_frame(page)
    page.click(".download")
    file = downloads / "my photo_1_mask.png"
    until(file.exists, "the mask is saved")
    labels = expected(results[0], 0.95)
    labels[labels == results[0].classes.index("disc")] = 0
    with Image.open(file) as mask:
        assert np.mean(np.asarray(mask) == np.array(results[0].class_ids)[labels]) > 0.999
    file.unlink()


def test_step_of_one_model_is_chosen_alone(page: Browser) -> None:
    page.run(
        "const step = document.querySelector('.step select'); step.value = 0; step.dispatchEvent(new Event('change'))"
    )
    page.wait("return document.querySelector('.probability select').length === arguments[0]", 1 + len(STEPS[0]))
    assert page.run("return document.querySelectorAll('.probability select')[1].length") == 1 + sum(map(len, STEPS))


def drop(page: Browser, name: str, kind: str, content: str) -> None:
    page.run(
        "const files = new DataTransfer();"
        "files.items.add(new File([Uint8Array.from(atob(arguments[2]), (c) => c.charCodeAt(0))], arguments[0],"
        " {type: arguments[1]}));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))",
        name,
        kind,
        content,
    )


def test_an_image_can_be_dropped(page: Browser) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (31, 17), "red").save(stream, "WEBP")
    drop(page, "red.webp", "image/webp", base64.b64encode(stream.getvalue()).decode())
    page.wait("return document.querySelector('.mask canvas').width === 31")


@pytest.mark.parametrize(("name", "kind", "said"), [
    ("notes.txt", "text/plain", "Notes.txt is text/plain; allowed are JPEG, PNG"),
    ("photo.heic", "", "Photo.heic is of an unknown type"),
])  # fmt: skip
def test_a_file_that_is_not_an_image_is_reported_at_once(page: Browser, name: str, kind: str, said: str) -> None:
    drop(page, name, kind, "aGVsbG8=")
    assert page.text("#message").startswith(said)


def test_a_broken_image_is_reported_and_the_next_works(
    window: Browser, server: DemoServer, photo: Path, tmp_path: Path
) -> None:
    window.open(server.url)
    window.wait(READY)
    broken = tmp_path / "broken.png"
    broken.write_bytes(photo.read_bytes()[:300])
    window.type("#file", str(broken))
    window.wait("return !document.querySelector('#message').hidden")
    assert window.text("#message").startswith("Cannot be read as an image")
    window.type("#file", str(photo))
    window.wait(f"{READY} && document.querySelector('#message').hidden")
    assert all("422" in line for line in window.console())  # what the browser says of a refused request
    window.requests()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_screenshot_of_every_kind_of_screen(page: Browser, width: int, scheme: str) -> None:
    page.run_command("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
    page.run_command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        next_frame(page)
        assert page.run("return document.documentElement.scrollWidth") <= width  # no horizontal scrolling
        with Image.open(io.BytesIO(page.screenshot())) as shot:
            assert shot.width == width
            corner: Any = shot.convert("L").getpixel((2, 300))
        assert corner < 60 if scheme == "dark" else corner > 200
    finally:
        page.run_command("Emulation.clearDeviceMetricsOverride")
        page.run_command("Emulation.setEmulatedMedia", features=[])


def test_everything_has_a_name_for_screen_readers(page: Browser) -> None:
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select')].filter((control) =>"
        " !(control.textContent.trim() && control.tagName === 'BUTTON') && !control.labels?.length"
        " && !control.querySelector?.('img[alt]')).map((control) => control.outerHTML)"
    )
    assert nameless == []
    assert "Mask over my photo.png" in page.run("return document.querySelector('.mask canvas').ariaLabel")


# Teaching a class


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    run = small_analytic_run(tmp_path_factory.mktemp("school") / "run")
    with serving(Models([run], "cpu", 1)) as server:
        yield server


@pytest.fixture
def lesson(window: Browser, school: DemoServer, photo: Path) -> Iterator[Browser]:
    """Open the view that teaches a class, with the photograph in it."""
    window.open(school.url)
    window.wait("return document.querySelector('.teach')")
    window.type("#file", str(photo))
    window.wait(f"{READY} && document.querySelector('.mask canvas').width === {SIZE[0]}")
    window.click(".teach")
    window.wait("return document.querySelector('.ink')?.width === arguments[0]", SIZE[0])
    yield window
    assert window.console() == []
    assert [url for url in window.requests() if not url.startswith(school.url)] == []


def draw(page: Browser, places: list[tuple[float, float]], kind: str = "mouse", lift: bool = False) -> None:
    """Press at the first place of the photograph and move to the others. With `lift`, press at each place."""
    page.run("document.querySelector('.ink').scrollIntoView({block: 'center'})")
    box = page.run("return document.querySelector('.ink').getBoundingClientRect().toJSON()")
    actions: list[dict[str, Any]] = []
    for number, (x, y) in enumerate(places):
        place = {"x": round(box["x"] + x * box["width"]), "y": round(box["y"] + y * box["height"])}
        actions.append({"type": "pointerMove", "duration": 0, "origin": "viewport", **place})
        if lift or number == 0:
            actions.append({"type": "pointerDown", "button": 0})
        if lift:
            actions += [{"type": "pointerUp", "button": 0}, {"type": "pause", "duration": 600}]  # not a double click
    if not lift:
        actions.append({"type": "pointerUp", "button": 0})
    pointer = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": actions}
    page._call("POST", "/actions", {"actions": [pointer]})
    next_frame(page)


def marked(page: Browser) -> np.ndarray:
    """Return (H, W) whether a pixel of the photograph is marked."""
    url = page.run("return document.querySelector('.ink').toDataURL()")
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as drawn:
        return np.asarray(drawn.convert("RGBA"))[..., 3] > 127


def choose_tool(page: Browser, name: str) -> None:
    page.run("document.querySelector(`[name=tool][value=${arguments[0]}]`).click()", name)


@pytest.mark.parametrize("kind", ["mouse", "touch"])
def test_masks_are_drawn_with_mouse_and_finger(lesson: Browser, kind: str) -> None:
    set_slider(lesson, "#brush", 10)
    draw(lesson, [(0.2, 0.2), (0.5, 0.2), (0.8, 0.2)], kind)
    brushed = marked(lesson)
    row, width = round(0.2 * SIZE[1]), 0.1 * SIZE[1]
    assert brushed[row, round(0.2 * SIZE[0]) : round(0.8 * SIZE[0])].all()
    assert abs(brushed[:, SIZE[0] // 2].sum() - width) <= 2
    choose_tool(lesson, "outline")
    draw(lesson, [(0.3, 0.5), (0.7, 0.5), (0.7, 0.9), (0.3, 0.9), (0.3, 0.5)], kind, lift=True)
    outlined = marked(lesson) & ~brushed
    assert abs(outlined.mean() - 0.4 * 0.4) < 0.03
    choose_tool(lesson, "erase")
    draw(lesson, [(0.5, 0.2), (0.5, 0.8)], kind)
    erased = marked(lesson)
    assert not erased[row : round(0.8 * SIZE[1]), SIZE[0] // 2].any()
    lesson.click("#undo")
    np.testing.assert_array_equal(marked(lesson), brushed | outlined)
    lesson.click("#clear")
    assert not marked(lesson).any()
    assert lesson.run("return document.querySelector('#teach-now').disabled")
    lesson.click("#undo")
    lesson.click("#undo")
    np.testing.assert_array_equal(marked(lesson), brushed)


def test_an_outline_follows_the_finger(lesson: Browser) -> None:
    choose_tool(lesson, "outline")
    angles = np.linspace(0, 2 * np.pi, 40)
    draw(lesson, [(0.5 + 0.3 * np.cos(a), 0.5 + 0.3 * np.sin(a)) for a in angles], "touch")
    assert abs(marked(lesson).mean() - np.pi * 0.3**2) < 0.02


def test_masks_come_from_files(lesson: Browser, tmp_path: Path) -> None:
    mask = np.zeros((SIZE[1], SIZE[0]), dtype=np.uint8)
    mask[5:20, 10:40] = 1  # an index mask, nearly black to the eye
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.new("L", (50, 50), 255).save(tmp_path / "square.png")
    lesson.type("#load-mask", str(tmp_path / "square.png"))
    lesson.wait("return !document.querySelector('.teach-error').hidden")
    assert "give a mask of its shape" in lesson.text(".teach-error")
    lesson.type("#load-mask", str(tmp_path / "mask.png"))
    lesson.wait("return document.querySelector('.teach-error').hidden")
    np.testing.assert_array_equal(marked(lesson), mask > 0)


def test_a_class_is_taught_shown_and_saved(lesson: Browser, downloads: Path) -> None:
    assert lesson.run("return document.querySelector('#teach-now').disabled")
    lesson.type("#class-name", "My thing")
    set_slider(lesson, "#brush", 30)
    draw(lesson, [(0.2, 0.5), (0.8, 0.5)])
    lesson.click("#teach-now")
    lesson.wait(
        "return !document.querySelector('#learnt').hidden && !document.querySelector('[aria-busy]')", seconds=400
    )
    assert lesson.text("#learnt p").startswith("Learnt “My thing” from 1 marked photograph in ")
    chosen = "const select = document.querySelector('.step select'); return select.selectedOptions[0].text"
    assert lesson.run(chosen) == "2: + My thing (taught here)"
    assert lesson.run("return document.querySelector('.mask canvas').width") == SIZE[0]
    assert lesson.run("return document.querySelector(\"#classes li[data-name='My thing']\") !== null")
    lesson.click("#learnt a")
    file = downloads / "run+My_thing.safetensors"
    until(file.exists, "the model is saved")
    assert load(file, device="cpu").classes[-1] == "My thing"
    lesson.click(".before")
    lesson.wait(f"{READY} && !document.querySelector(\"#classes li[data-name='My thing']\")")
    lesson.click("#more" if lesson.run("return !document.querySelector('#learnt').hidden") else ".teach")
    assert lesson.run("return [document.querySelector('#base').value, document.querySelector('#photos').children.length]") == ["1", 1]  # fmt: skip  # noqa: E501


def test_a_refused_lesson_does_not_lose_the_drawing(lesson: Browser) -> None:
    lesson.type("#class-name", "Disc")
    draw(lesson, [(0.2, 0.5), (0.8, 0.5)])
    drawn = marked(lesson)
    lesson.click("#teach-now")
    lesson.wait("return !document.querySelector('.teach-error').hidden")
    assert lesson.text(".teach-error") == "The model knows the class 'disc' already; write it so to improve it."
    np.testing.assert_array_equal(marked(lesson), drawn)
    assert all("422" in line for line in lesson.console())  # what the browser says of a refused request


def test_a_model_without_sums_cannot_be_taught(page: Browser) -> None:
    assert page.text(".cannot").startswith("This model has no sums, so it cannot be taught here")
    assert page.run("return document.querySelector('.teach').hidden")
