"""The page in a real browser; skipped without selenium and Debian's chromium with its driver."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.web.runs import end_server_of, incident_event, status_of, write_run
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.run_view import RunView
from ttprun.observe.status import RankTopology, Topology, write_status
from ttprun.web.companion import serving
from ttprun.web.page import as_html

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
wait = pytest.importorskip("selenium.webdriver.support.ui", reason="no selenium")
service = pytest.importorskip("selenium.webdriver.chrome.service", reason="no selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium (Debian: chromium, chromium-driver)")
LIMIT_S = 100
QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)


class Browser:
    """A page, and what it did to be shown."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1200, scheme: str = "light") -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.complaints()  # of the page before
        self.driver.get(url)
        self.wait_for("return state.events.length >= 7 && document.querySelector('#events tr') !== null")

    def ask(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait_for(self, script: str) -> None:
        wait.WebDriverWait(self.driver, LIMIT_S, 0.1).until(lambda driver: driver.execute_script(script))

    def text(self, selector: str) -> str:
        return str(self.ask(f"return document.querySelector({selector!r}).textContent"))

    def complaints(self) -> list[Any]:
        return list(self.driver.get_log("browser"))

    def requests(self) -> set[str]:
        sent = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = {entry["params"]["request"]["url"] for entry in sent if entry["method"] == "Network.requestWillBeSent"}
        return {url for url in urls if not url.startswith("data:")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in QUIET:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=service.Service(DRIVER))
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "run", replace(status_of(ranks=8), updated_at=timestamp()))


@pytest.fixture
def url(run: RunDirectory) -> Iterator[str]:
    with serving(":0", None, run) as address:
        yield address


@pytest.mark.parametrize("width", [400, 2000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_complains_of_nothing_and_asks_nobody_else(
    browser: Browser, url: str, width: int, scheme: str
) -> None:
    browser.requests()

    browser.open(url, width, scheme)

    assert browser.ask("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert browser.requests() == {url, f"{url}api/events"}


def test_it_follows_the_job_while_it_is_open(browser: Browser, url: str, run: RunDirectory) -> None:
    browser.open(url)

    status = status_of(ranks=8, step=77, updated_at=timestamp(), state="recovering")
    write_status(run.status, replace(status, ranks=(*status.ranks[:7], replace(status.ranks[7], state="lost"))))

    browser.wait_for("return document.querySelector('[data-index=\"7\"]').textContent === '✕ 7'")
    assert browser.text("#sentence") == "Recovering: rank 1 was killed (SIGKILL) in step 40."
    assert browser.text("#announced") == browser.text("#sentence")
    assert "recovering" in browser.ask("return document.title")


def test_when_its_node_is_lost_it_says_where_the_job_is_shown_from_then_on(browser: Browser, run: RunDirectory) -> None:
    pages = ("http://a:8080/", "http://b:8080/", "", "http://d:8080/")
    write_status(run.status, status_of(ranks=8, updated_at=timestamp(), nodes=("a", "b", "c", "d"), pages=pages))

    with serving(":0", None, run) as url:
        browser.open(url)
        end_server_of(run)
        browser.wait_for("return !byId('connection').hidden")

    assert browser.text("#connection") == (
        "Not connected; trying again … If this node is lost, the job is shown by node 1, or node 3"
    )
    assert browser.ask("return document.querySelector('#connection a').href") == "http://b:8080/"


def test_an_incident_shows_its_phases_and_what_is_proved(browser: Browser, url: str) -> None:
    browser.open(url)

    picture = browser.ask("return document.querySelector('.waterfall svg').getAttribute('aria-label')")
    assert picture.startswith(
        "Phases of incident 1: detect 0 s, freeze 0.100 s, spawn 0.300 s, replay 0.700 s, transfer"
    )
    assert "rank 1: 1 loss in step 40" in browser.text(".incident")
    assert "cache (sqlite3.Connection)" in browser.text(".incident")


def test_ranks_can_be_read_by_keyboard(browser: Browser, url: str) -> None:
    browser.open(url)

    browser.ask("document.querySelector('.cell').focus()")
    for key in ("ArrowRight", "ArrowRight", "End"):
        browser.ask(
            f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
        )

    assert browser.ask("return document.activeElement.getAttribute('aria-label')") == "rank 7: running"
    assert browser.text("#rank").startswith("Rank 7 (local 7): running, computing, step 50")


def test_ranks_can_be_shown_by_their_groups_and_say_what_their_loss_costs(browser: Browser, run: RunDirectory) -> None:
    ranks = tuple(RankTopology(rank, {"tp": rank % 2, "dp": rank // 2}, rank // 2, "peer") for rank in range(8))
    replicas = ((0, 1), (2, 3), (4, 5), (6, 7))
    run.topology.write_text(Topology(1, {"tp0": (0, 2, 4, 6)}, replicas, (), ranks).to_json())
    with serving(":0", None, run) as url:
        browser.open(url)
        browser.wait_for("return byId('rows').options.length === 3")

        browser.ask("byId('rows').value = 'tp'; byId('rows').dispatchEvent(new Event('change'))")
        browser.wait_for("return document.querySelectorAll('.node').length === 2")

    assert browser.text(".node") == "tp0● 0● 2● 4● 6"
    assert "its loss costs nothing" in browser.ask("return describeRank(state.status.ranks[3], state.status)")


def test_stragglers_are_named(browser: Browser, run: RunDirectory) -> None:
    status = status_of(ranks=4, updated_at=timestamp())
    ranks = (replace(status.ranks[0], busy=0.98), *(replace(rank, busy=0.6) for rank in status.ranks[1:]))
    write_status(run.status, replace(status, ranks=ranks))
    with serving(":0", None, run) as url:
        browser.open(url)

    assert "Rank 0 holds up the others: it computes 98 % of the time, most ranks 60 %" in browser.text("#stragglers")


def test_the_log_can_be_searched_and_what_it_holds_is_text(browser: Browser, url: str) -> None:
    browser.open(url)

    browser.ask("byId('search').value = 'note bold'; byId('search').dispatchEvent(new Event('input'))")
    browser.wait_for("return document.querySelectorAll('#events tr').length === 1")

    assert "text=</script><b>bold</b>" in browser.text("#events")
    assert browser.ask("return document.querySelector('#events b')") is None


def test_the_text_for_an_issue_holds_incidents_and_the_last_events(browser: Browser, url: str) -> None:
    browser.open(url)

    text = browser.ask("return asText()")

    assert "incident 1: signal 9, rank 1, replace: recovered; rank 1 was killed (SIGKILL) in step 40" in text
    assert "rank_exited" in text


def test_a_time_that_was_mostly_an_incident_says_nothing_of_the_speed(browser: Browser, url: str) -> None:
    browser.open(url)

    history, incidents = [[100, 1], [101, 2], [102, 3], [105, 4], [106, 5]], [[102.1, 104.0]]

    found = browser.ask(f"return speeds({history}, {incidents})")
    assert found == [[101, 1, False], [102, 1, False], [106, 1, True]]


def test_8192_ranks_are_drawn_on_a_canvas(browser: Browser, run: RunDirectory) -> None:
    write_status(run.status, status_of(ranks=8192, updated_at=timestamp()))
    with serving(":0", None, run) as url:
        browser.open(url)

    assert browser.ask("return document.querySelector('#ranks canvas') !== null")
    assert browser.text("#ranks-legend") == "● 8192 running"
    assert browser.complaints() == []


def test_a_report_is_read_without_a_server(browser: Browser, run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(as_html(RunView(run)))
    browser.requests()

    browser.open(file.as_uri())

    assert browser.requests() == {file.as_uri()}
    assert "Report of ttprun" in browser.text("#connection")
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_rules_of_axe_core_are_kept(browser: Browser, url: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python")
    browser.open(url, scheme=scheme)
    browser.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")

    browser.ask((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.driver.execute_async_script("const done = arguments[0]; axe.run().then(done);")

    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []


def test_where_all_ranks_stood_when_one_hung_is_shown_side_by_side(
    browser: Browser, url: str, run: RunDirectory
) -> None:
    groups = [{"ranks": [1], "place": "step 40, computing", "main": "train.py, line 4"}]
    groups += [{"ranks": [0, 2], "place": "step 40, waiting in allreduce", "main": "train.py, line 9"}]
    event = {"at": incident_event(40.5, "open", 40)["at"], "event": "stacks", "because_of": 1, "groups": groups}
    with open(run.events, "a") as log:
        log.write("\n" + json.dumps(event | {"flight_records": ["/tmp/nccl_trace_rank_1"]}) + "\n")

    browser.open(url)

    browser.wait_for("return document.querySelectorAll('.side-by-side > div').length === 2")
    assert browser.text(".side-by-side") == (
        "Rank 1: step 40, computingtrain.py, line 4Ranks 0, 2: step 40, waiting in allreducetrain.py, line 9"
    )
    assert "flight record: /tmp/nccl_trace_rank_1" in browser.text(".incident")
