"""The explorer's data by hand, its page as a file, and the verb as a user calls it."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from explorer_runs import HOSTILE, NOTHING, Run, Texts, random_answer, record
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eagle_tree.explore import PLACE, TEMPLATE, Vocabulary, collect, render, select
from eagle_tree.record import read_run

# root ─┬─ 1 (.5) ─┬─ 3 (.5) ── 5 (.25)
#       └─ 2 (.25) └─ 4 (.125)            the target's token is 1, then 4, then none of a leaf's
TREE = record(
    parent=[0, 0, 1, 1, 3],
    token=[11, 12, 13, 14, 15],
    confidence=[0.5, 0.25, 0.5, 0.125, 0.25],
    target=[0.8, 0.1, 0.2, 0.6, 0.0],
    path=[1, 4],
)
CHAIN = record(parent=[0, 1], token=[11, 13], confidence=[0.5, 0.5], target=[0.8, 0.2], path=[1])


def run_of_three() -> Run:
    """One prompt answered alike by three policies; `tree` needs one pass, `chain` two, `plain` three."""
    run = Run()
    run.answer("plain", "q1", [10, 11, 14, 16], [NOTHING] * 3)
    run.answer("chain", "q1", [10, 11, 14, 16], [CHAIN, NOTHING])
    run.answer("tree", "q1", [10, 11, 14, 16], [TREE])
    return run


def data_of(tables: dict, tokenizer=None, **options) -> dict:
    return collect(tables, select(tables, **options), tokenizer)


def answer_of(data: dict, policy: str, prompt: int = 0) -> dict:
    return data["prompts"][prompt]["answers"][data["policies"].index(policy)]


# --- the data ---


def test_a_pass_is_its_nodes_its_walk_and_where_it_stands():
    data = data_of(run_of_three().tables())
    (one,) = answer_of(data, "tree")["passes"]
    assert one["root"] == 0
    assert one["emitted"] == 3
    assert one["parent"] == [0, 0, 1, 1, 3]
    assert [data["tokens"]["id"][token] for token in one["token"]] == [11, 12, 13, 14, 15]
    assert one["path"] == [1, 4]
    assert one["ms"] == [250.0] * 5
    assert [p["root"] for p in answer_of(data, "chain")["passes"]] == [0, 2]
    assert [data["tokens"]["id"][token] for token in answer_of(data, "chain")["token"]] == [10, 11, 14, 16]


def test_confidences_and_expectations_survive_the_writing():
    data = data_of(run_of_three().tables())
    (one,) = answer_of(data, "tree")["passes"]
    confidence = np.exp(-data["step"] * np.array(one["conf"]))
    assert confidence == pytest.approx([0.5, 0.25, 0.5, 0.125, 0.25], abs=1e-4)
    assert one["target"][4] is None  # probability 0
    # by hand: 1 + .5 + .25 + .25 + .0625 + .0625, and 1 + .8 + .1 + .16 + .48 + 0
    assert one["expected"] == pytest.approx([2.125, 2.54])


def test_the_page_opens_with_the_largest_trees_unless_policies_are_named():
    tables = run_of_three().tables()
    assert data_of(tables)["policies"] == ["tree", "chain", "plain"]
    assert data_of(tables, policies=["plain", "tree"])["policies"] == ["plain", "tree"]


def test_a_policy_without_an_answer_to_a_prompt_has_none_there():
    """An interrupted run may end between two policies."""
    run = run_of_three().answer("tree", "q2", [10, 11, 14, 16], [TREE])
    data = data_of(run.tables())
    assert answer_of(data, "tree", prompt=1) is not None
    assert answer_of(data, "plain", prompt=1) is None


def test_an_answer_of_one_token_has_no_pass():
    run = run_of_three().answer("tree", "q2", [10], []).answer("chain", "q2", [10, 16], [NOTHING])
    assert answer_of(data_of(run.tables()), "tree", prompt=1)["passes"] == []


def test_prompts_fill_the_page_up_to_max_passes():
    run = Run()
    for name in ("q1", "q2", "q3"):
        run.answer("plain", name, [10, 11, 14], [NOTHING] * 2)
    tables = run.tables()
    ids = [[entry["id"] for entry in data_of(tables, max_passes=n)["prompts"]] for n in (1, 4, 5, 6)]
    assert ids == [["q1"], ["q1", "q2"], ["q1", "q2"], ["q1", "q2", "q3"]]
    assert data_of(tables, max_passes=4)["left_out"] == 1
    assert [entry["id"] for entry in data_of(tables, prompts=["q3", "q1"], max_passes=1)["prompts"]] == ["q3", "q1"]


def test_a_token_is_written_once():
    data = data_of(run_of_three().tables(), Texts([f"t{i}" for i in range(20)]))
    assert sorted(data["tokens"]["id"]) == [10, 11, 12, 13, 14, 15, 16]
    assert data["tokens"]["text"] == [f"t{token}" for token in data["tokens"]["id"]]


def test_a_long_text_is_cut_and_says_so():
    texts = Vocabulary(Texts(["x", "y" * 10_000]))
    texts.index(1)
    assert texts.table()["text"] == ["y" * 200 + "… (10000 characters)"]


def test_a_character_that_spans_tokens_stands_where_it_ends():
    """Byte-level tokens: each but the last of a character decodes to a replacement sign."""

    class Bytes:
        def encode(self, text, add_special_tokens):
            return list(text.encode())

        def decode(self, tokens, **options):
            return bytes(tokens).decode(errors="replace")

    tokens = list("né🙂".encode())
    assert Vocabulary(Bytes()).joint_texts(tokens) == {1: "", 2: "é", 3: "", 4: "", 5: "", 6: "🙂"}
    assert Vocabulary(Bytes()).joint_texts(tokens[:-1])[5] == "\ufffd"  # the text ends within a character


def test_the_space_before_a_token_is_kept_where_a_tokenizer_drops_it_from_a_text():
    """SentencePiece: the first token of a text loses its space."""

    class Pieces:
        def encode(self, text, add_special_tokens):
            return [0]

        def decode(self, tokens, **options):
            return "".join(("a", " the")[token] for token in tokens).removeprefix(" ")

    assert Vocabulary(Pieces()).text([1]) == " the"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"policies": ["tree", "trie"]}, "policies: 'trie' is not in the run; it has tree, chain, plain"),
        ({"policies": []}, "policies: the list is empty; it has tree, chain, plain"),
        ({"prompts": ["q7"]}, "prompts: 'q7' is not in the run; it has q1"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        data_of(run_of_three().tables(), **options)


def test_a_run_without_passes_is_refused():
    with pytest.raises(ValueError, match="the run has no passes: every answer ended with its first token"):
        data_of(Run().answer("tree", "q1", [10], []).tables())


def test_a_run_without_nodes_is_refused_unless_nothing_was_drafted():
    tables = run_of_three().tables()
    tables["nodes"] = tables["nodes"][:0]
    with pytest.raises(ValueError, match="record_nodes=false"):
        data_of(tables)
    assert data_of(Run().answer("plain", "q1", [10, 11], [NOTHING]).tables())["policies"] == ["plain"]


@pytest.mark.parametrize("table", ["passes", "nodes", "outputs"])
def test_tables_of_different_runs_are_refused(table):
    tables = run_of_three().tables()
    other = Run().answer("tree", "q1", [10, 11, 16], [CHAIN]).answer("chain", "q1", [10, 11, 16], [CHAIN])
    tables[table] = other.tables()[table]
    with pytest.raises(ValueError, match="do not belong together"):
        data_of(tables, policies=["tree", "chain"])


# --- the page ---


class Elements(HTMLParser):
    """The start tags of a page and the content of its data element, by the rules of HTML."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data = ""
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.inside = ("id", "data") in attributes

    def handle_data(self, data):
        self.data += data if self.inside else ""

    def handle_endtag(self, tag):
        self.inside = False


def hostile_data() -> dict:
    """A page's data whose every text is hostile."""
    output, trees = random_answer(np.random.default_rng(0), passes=6, nodes=20, tokens=len(HOSTILE))
    output[0] = 0
    run = Run().answer("</script><b>", '"</title>\u202e', output, trees)
    return data_of(run.tables(), Texts(HOSTILE)) | {"run": {"name": "</title><script>"}}


def test_hostile_texts_stay_within_the_data_element():
    data = hostile_data()
    page = render(data)
    found, template = Elements(page), Elements(TEMPLATE.read_text())
    assert found.tags == template.tags
    assert found.attributes == template.attributes
    assert json.loads(found.data) == json.loads(json.dumps(data))
    assert page.split("<script id=")[1].split("</script>")[0].isascii()


def test_the_page_asks_for_nothing():
    """No address, no import, no request: and a policy that would forbid them."""
    page = render(data_of(run_of_three().tables())).replace("http://www.w3.org/2000/svg", "")
    for sign in ("http:", "https:", "//cdn", "src=", "href=", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert sign not in page, sign
    assert "default-src 'none'" in page


def test_a_text_enters_the_page_as_text_only():
    template = TEMPLATE.read_text()
    for sign in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sign not in template, sign
    assert template.count(PLACE) == 1


def test_a_page_of_two_hundred_passes_is_within_three_megabytes():
    """200 passes of each of two policies, 59 nodes each, over a vocabulary of 50,000 distinct texts."""
    rng = np.random.default_rng(0)
    run = Run()
    for policy in ("a", "b"):
        run.answer(policy, "q1", *random_answer(rng, passes=200, nodes=59, tokens=50_000))
    texts = Texts([f"token-{i}" for i in range(50_000)])
    assert len(render(data_of(run.tables(), texts))) < 3e6


# --- the verb ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of the words w0 … w19."""
    folder = tmp_path_factory.mktemp("target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(20)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture()
def folder(tmp_path, tokenizer):
    """A recorded run."""
    about = {"config": {"target": {"name_or_path": str(tokenizer)}, "temperature": 0.0}, "dtype": "float32"}
    run_of_three().write(tmp_path / "run", about)
    return tmp_path / "run"


@pytest.fixture()
def explore(eagle_tree):
    """Calls the verb in this process; gives exit status, output and errors."""
    return lambda *arguments: eagle_tree("explore", *(str(argument) for argument in arguments))


def written(page) -> dict:
    return json.loads(Elements(page.read_text()).data)


def test_the_verb_writes_a_page_a_table_and_a_json_line(folder, explore):
    status, output, errors = explore(folder)
    assert status == 0, errors
    lines = output.strip().splitlines()
    report = json.loads(lines[-1])
    page = folder / "explorer.html"
    assert report == {
        "verb": "explore", "page": str(page), "bytes": page.stat().st_size, "policies": ["tree", "chain", "plain"],
        "prompts": 1, "left_out": 0, "passes": 6, "whole_run": True,
    }  # fmt: skip
    assert lines[0].split()[:2] == ["policy", "passes"]
    data = written(page)
    assert data["run"]["name"] == "run"
    assert "w11" in data["tokens"]["text"][data["tokens"]["id"].index(11)]
    assert str(folder) not in page.read_text()  # the page tells nothing of the machine's folders
    assert not list(folder.glob("*.tmp"))


def test_the_page_goes_where_it_is_wanted(folder, explore, tmp_path):
    assert explore(folder, f"page={tmp_path}/there/page.html", "policies=[plain]", "tokenizer=null")[0] == 0
    data = written(tmp_path / "there" / "page.html")
    assert data["policies"] == ["plain"]
    assert data["tokens"]["text"] == []
    assert not (folder / "explorer.html").exists()


def test_a_partial_run_shows_its_finished_answers_once_its_tokenizer_is_named(tmp_path, tokenizer, explore):
    run_of_three().write(tmp_path / "run", None)
    status, _, errors = explore(tmp_path / "run")
    assert status == 1
    assert "tokenizer=run, but the run has no run.json" in errors and "or null for token ids" in errors
    status, output, errors = explore(tmp_path / "run", f"tokenizer={tokenizer}")
    assert status == 0, errors
    assert "interrupted before its end: only its finished answers are shown" in output
    assert json.loads(output.strip().splitlines()[-1])["whole_run"] is False
    assert written(tmp_path / "run" / "explorer.html")["run"] == {"name": "run", "whole": False}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "run: name the folder of a recorded run"),
        (["{folder}/nowhere"], "nowhere is no folder"),
        (["{folder}/.."], "holds no run with finished answers"),
        (["{folder}", "policies=[trie]"], "policies: 'trie' is not in the run; it has tree, chain, plain"),
        (["{folder}", "policies=tree"], "policies='tree' must be a list of names, such as policies=[tree]"),
        (["{folder}", "prompts=[7]"], "prompts: '7' is not in the run; it has q1"),
        (["{folder}", "max_passes=0"], "max_passes=0 must be an integer >= 1"),
        (["{folder}", "tokenizer={folder}"], "tokenizer must be run (the target's own), a folder, a hub id"),
        (["{folder}", "page={folder}"], "is a folder; name a file in it"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(folder, explore, arguments, complaint):
    status, _, errors = explore(*(argument.format(folder=folder) for argument in arguments))
    assert status == 1
    assert complaint in errors
    assert "Traceback" not in errors
    assert not (folder / "explorer.html").exists()


def test_a_tokenizer_that_reads_the_answers_otherwise_is_refused(tmp_path, tokenizer, explore):
    run = run_of_three()
    for _, _, output in run.answers:
        output["text"] = "another text"
    run.write(tmp_path / "run", {"config": {"target": {"name_or_path": str(tokenizer)}}})
    status, _, errors = explore(tmp_path / "run")
    assert status == 1
    assert "otherwise than it was recorded: it is not the run's" in errors


def test_tables_of_another_schema_are_named(folder, explore):
    table = read_run(folder, "nodes").drop(columns="target_log_prob")
    table.to_parquet(folder / "nodes.parquet")
    status, _, errors = explore(folder)
    assert status == 1
    assert "nodes.parquet was recorded under another schema: target_log_prob is missing" in errors


def test_a_page_that_cannot_be_written_leaves_the_old_one(folder, explore, monkeypatch):
    (folder / "explorer.html").write_text("the old page")

    def full_disk(source, destination):
        raise OSError("no space left")

    monkeypatch.setattr("eagle_tree.files.os.replace", full_disk)
    status, _, errors = explore(folder)
    assert status == 1
    assert "no space left" in errors
    assert (folder / "explorer.html").read_text() == "the old page"
    assert not list(folder.glob("*.tmp"))
