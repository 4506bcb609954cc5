"""OpenAI's APIs, asked by its official client, unmodified: the real server, a real vision host, the bundled model."""
import base64
import json
import os
import pathlib
import re
import shutil
import signal

import pytest

import lab
from lab import TOP

openai = pytest.importorskip("openai", reason="the openai package is not installed")

PICTURES = TOP / "tests/data/pictures"
QUESTIONS = json.loads((PICTURES / "questions.json").read_text())
Q = QUESTIONS[0]
PICTURE = PICTURES / Q["picture"]
LOOK = {"name": "look", "description": "Looks at a place.", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
ON = {"ignore_eos": True}  # for tests that need an answer of a certain length, whatever the model would say
TOOL = {"type": "function", "function": LOOK}
FLAT_TOOL = {"type": "function", **LOOK}


def plain(text):
    return text.strip().rstrip(".").lower()


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words):
    return {"type": "text", "text": words}


def user(*content):
    return {"role": "user", "content": list(content)}


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    """A server with a vision host behind it and a folder of pictures beside it."""
    if lab.SSHD is None:
        pytest.skip("no sshd on this machine")
    tmp = tmp_path_factory.mktemp("openai")
    folder = tmp / "pictures"
    folder.mkdir()
    shutil.copy(PICTURE, folder / "a b.png")
    (tmp / "secret.png").write_bytes(PICTURE.read_bytes())
    (folder / "out.png").symlink_to(tmp / "secret.png")
    os.mkfifo(folder / "fifo.png")
    host = lab.VisionHost(tmp / "host").start()
    server = lab.Server(tmp / "server", [host], name="mini", picture_folders=[str(folder)])
    server.folder = folder
    try:
        yield server.wait_for_eyes()
    finally:
        server.stop()
        host.stop()


@pytest.fixture(scope="module")
def client(eyes):
    return openai.OpenAI(base_url=eyes.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def truth(eyes):
    return eyes.ask(Q["question"], PICTURE)


def refusal(call):
    """(status, param, code) of the error that the client raises."""
    with pytest.raises(openai.APIStatusError) as e:
        call()
    assert set(e.value.body) == {"message", "type", "param", "code"}
    return e.value.status_code, e.value.body["param"], e.value.body["code"]


# ---- chat completions ----

def test_a_chat_with_a_picture(client, truth):
    r = client.chat.completions.create(model="mini", messages=[user(image(lab.data_url(PICTURE), detail="high"), text(Q["question"]))])
    assert r.choices[0].message.content == truth and r.choices[0].finish_reason == "stop"
    assert r.choices[0].message.tool_calls is None and r._request_id == r.id
    # Clients of the responses API send its parts here as well.
    parts = {"type": "input_image", "image_url": lab.data_url(PICTURE)}, {"type": "input_text", "text": Q["question"]}
    assert client.chat.completions.create(model="mini", messages=[user(*parts)]).choices[0].message.content == truth


def test_usage_comes_last_in_a_stream(client):
    chunks = list(client.chat.completions.create(model="mini", messages=[user(text("hi"))], stream=True, stream_options={"include_usage": True}))
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason and len({c.id for c in chunks}) == 1


def test_progress_of_the_prompt(client):
    ask = dict(model="mini", messages=[user(text("how far? " * 100))], max_tokens=1, stream=True)
    chunks = list(client.chat.completions.create(**ask, extra_body={"return_progress": True}))
    steps = [c.prompt_progress for c in chunks if hasattr(c, "prompt_progress")]
    assert steps and steps[-1]["processed"] == steps[-1]["total"] and all(set(s) == {"total", "cache", "processed", "time_ms"} for s in steps)
    assert [s["processed"] for s in steps] == sorted(s["processed"] for s in steps) and steps[0]["cache"] <= steps[0]["processed"]
    assert not any(hasattr(c, "prompt_progress") for c in client.chat.completions.create(**ask))


def test_probabilities(client):
    ask = dict(model="mini", messages=[user(text("hi"))], max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    r = client.chat.completions.create(**ask)
    tokens = r.choices[0].logprobs.content
    assert "".join(t.token for t in tokens) == r.choices[0].message.content
    for t in tokens:
        assert bytes(t.bytes).decode() == t.token and len(t.top_logprobs) == 3
        # Without temperature the likeliest is taken, and what is reported is in order.
        assert t.top_logprobs[0].token == t.token and t.logprob == t.top_logprobs[0].logprob <= 0
        assert [p.logprob for p in t.top_logprobs] == sorted((p.logprob for p in t.top_logprobs), reverse=True)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    streamed = [t for c in chunks for o in c.choices if o.logprobs for t in o.logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in tokens]
    plain_answer = client.chat.completions.create(model="mini", messages=[user(text("hi"))], max_tokens=2)
    assert plain_answer.choices[0].logprobs is None


def test_a_required_call_is_opened_for_the_model(client):
    """The bundled model calls nothing by itself: what it makes of the opening is text, or by chance a call."""
    ask = dict(model="mini", messages=[user(text("look"))], tools=[TOOL], max_tokens=8, temperature=0)
    for choice in "required", {"type": "function", "function": {"name": "look"}}:
        message = client.chat.completions.create(**ask, tool_choice=choice).choices[0].message
        said = message.content or ""
        assert message.tool_calls or said.startswith('<tool_call>\n{"name": "look", "arguments":'), message
        deltas = [c.choices[0].delta for c in client.chat.completions.create(**ask, tool_choice=choice, stream=True)]
        assert "".join(d.content or "" for d in deltas) == said
    count = [client.chat.completions.create(**ask, tool_choice=choice).usage.prompt_tokens for choice in ("auto", "none")]
    assert count[0] > count[1]  # none: the model is not told of them


def test_pictures_in_results_of_tools(client, eyes):
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}]
    for content, pictures in ("nothing", 0), ([image(lab.data_url(PICTURE)), text("this")], 1):
        body = {"messages": [user(text("look")), {"role": "assistant", "content": None, "tool_calls": calls},
                             {"role": "tool", "tool_call_id": "c1", "content": content}], "tools": [TOOL], "max_tokens": 4}
        status, reply = eyes.request("/v1/chat/completions", body)
        assert status == 200, reply
        assert len(reply["timings"]["pictures"]) == pictures
    items = [{"role": "user", "content": "look"}, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": lab.data_url(PICTURE)}]}]
    r = client.responses.create(model="mini", input=items, tools=[FLAT_TOOL], max_output_tokens=4)
    assert len(r.timings["pictures"]) == 1


@pytest.mark.parametrize("more, param", [
    ({"n": 2}, "n"), ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"functions": [LOOK]}, "functions"), ({"function_call": "auto"}, "function_call"), ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "hear"}}}, "tool_choice.function.name"),
    ({"modalities": ["text", "audio"]}, "modalities")])
def test_what_can_not_be_honoured_is_refused(client, more, param):
    for stream in False, True:
        ask = dict(model="mini", messages=[user(text("hi"))], stream=stream)
        assert refusal(lambda: client.chat.completions.create(**ask, **more)) == (400, param, None)


def test_a_model_without_a_form_for_tools_says_so(servers):
    client = openai.OpenAI(base_url=servers(chat_template="gemma").url + "/v1", api_key="none", max_retries=0)
    assert refusal(lambda: client.chat.completions.create(model="m", messages=[user(text("hi"))], tools=[TOOL])) == (400, "tools", None)
    assert refusal(lambda: client.responses.create(model="m", input="hi", tools=[FLAT_TOOL])) == (400, "tools", None)
    assert client.chat.completions.create(model="m", messages=[user(text("hi"))], tools=[TOOL], tool_choice="none", max_tokens=1)


def test_marks_of_pictures_in_text_are_text(eyes):
    """As many pictures as were sent, whatever the text says."""
    for words in "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>":
        status, reply = eyes.chat(user(text(words), image(lab.data_url(PICTURE)), text(words)), max_tokens=2)
        assert status == 200 and len(reply["timings"]["pictures"]) == 1, reply
        status, reply = eyes.chat(user(text(words)), max_tokens=2)
        assert status == 200 and reply["timings"]["pictures"] == []


def test_base64_without_its_url_is_told_what_to_do(client):
    raw = base64.b64encode(PICTURE.read_bytes()).decode()
    for url in raw, "/9j/4AAQSkZJRgABAQ":
        with pytest.raises(openai.BadRequestError, match="data:image/png;base64,") as e:
            client.chat.completions.create(model="mini", messages=[user(image(url))])
        assert e.value.body["param"] == "messages[0].content[0].image_url.url"


# ---- pictures that are files of this machine ----

def test_files_of_the_folders(eyes, truth):
    path = eyes.folder / "a b.png"
    for url in str(path), path.as_uri(), f"file://localhost{eyes.folder}/a%20b.png", str(eyes.folder / "../pictures/a b.png"):
        status, reply = eyes.chat(user(image(url), text(Q["question"])))
        assert status == 200 and reply["choices"][0]["message"]["content"] == truth, reply


def test_files_elsewhere_are_refused_in_one_way(eyes):
    texts = set()
    for name in "../secret.png", "out.png", "missing.png", "../missing.png", "/etc/hostname", "/nonexistent/x", "/dev/zero":
        status, reply = eyes.chat(user(image(os.path.join(eyes.folder, name)), text("what?")))
        assert status == 400 and reply["error"]["code"] == "picture_not_fetched", reply
        assert reply["error"]["param"] == "messages[0].content[0].image_url.url"
        texts.add(reply["error"]["message"])
    assert len(texts) == 1
    status, reply = eyes.chat(user(image(str(eyes.folder / "fifo.png")), text("what?")))
    assert status == 400 and "no regular file" in reply["error"]["message"]
    assert eyes.ask("hi")


def test_no_files_without_folders(servers):
    server = servers()
    for url in str(PICTURE), PICTURE.as_uri(), "file:///etc/hostname":
        status, reply = server.chat(user(image(url), text("what?")))
        assert status == 400 and "reads no files" in reply["error"]["message"], reply


# ---- completions ----

def test_completions(client):
    ask = dict(model="mini", prompt="What is", max_tokens=5, temperature=0, extra_body=ON)
    r = client.completions.create(**ask)
    assert r.object == "text_completion" and r.choices[0].text and r.choices[0].finish_reason == "length"
    assert r.usage.completion_tokens == 5 and r.choices[0].logprobs is None
    assert client.completions.create(**{**ask, "prompt": ["What is"]}).choices[0].text == r.choices[0].text
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == r.choices[0].text
    assert chunks[-1].usage.completion_tokens == 5 and chunks[-2].choices[0].finish_reason == "length"
    assert client.completions.create(model="mini", prompt="What is", extra_body=ON).usage.completion_tokens == 16


def test_completions_of_token_ids(client):
    ask = dict(model="mini", max_tokens=4, temperature=0)
    one, other = (client.completions.create(**ask, prompt=p) for p in ([5, 6, 7], [[5, 6, 7]]))
    assert one.choices[0].text == other.choices[0].text and one.usage.prompt_tokens == 3
    assert refusal(lambda: client.completions.create(**ask, prompt=[2**31 - 1])) == (400, "prompt", None)


def test_probabilities_of_completions(client):
    ask = dict(model="mini", prompt="What is", max_tokens=5, temperature=0, logprobs=2)
    r = client.completions.create(**ask)
    p, said = r.choices[0].logprobs, r.choices[0].text
    assert "".join(p.tokens) == said and len(p.tokens) == len(p.token_logprobs) == len(p.top_logprobs)
    assert all(said[at:].startswith(t) for at, t in zip(p.text_offset, p.tokens))
    assert all(max(top, key=top.get) == t and top[t] == lp for top, t, lp in zip(p.top_logprobs, p.tokens, p.token_logprobs))
    streamed = [c.choices[0].logprobs for c in client.completions.create(**ask, stream=True) if c.choices[0].logprobs]
    assert [t for s in streamed for t in s.tokens] == p.tokens and [o for s in streamed for o in s.text_offset] == p.text_offset


@pytest.mark.parametrize("more, param", [({"n": 2}, "n"), ({"best_of": 2}, "best_of"), ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"),
                                         ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": ""}, "prompt")])
def test_completions_refuse_by_name(client, more, param):
    assert refusal(lambda: client.completions.create(**{"model": "mini", "prompt": "a", **more})) == (400, param, None)


def test_a_completion_that_does_not_fit(client):
    assert refusal(lambda: client.completions.create(model="mini", prompt="word " * 20000)) == (400, "prompt", "context_length_exceeded")


# ---- responses ----

def picture_items():
    return [{"role": "user", "content": [{"type": "input_image", "image_url": lab.data_url(PICTURE), "detail": "auto"},
                                         {"type": "input_text", "text": Q["question"]}]}]


def test_a_response_about_a_picture(client, truth):
    r = client.responses.create(model="mini", input=picture_items(), temperature=0, store=True)
    assert r.output_text == truth and r.status == "completed" and r.object == "response" and r.id.startswith("resp_")
    assert r.error is None and r.incomplete_details is None and r.store is False and r.model == "mini"
    assert r.usage.input_tokens + r.usage.output_tokens == r.usage.total_tokens and r.usage.output_tokens_details.reasoning_tokens == 0
    again = client.responses.create(model="mini", input=picture_items(), temperature=0)
    assert again.output_text == truth and again.usage.input_tokens_details.cached_tokens > 0


def test_the_events_of_a_response(client, truth):
    events = list(client.responses.create(model="mini", input=picture_items(), temperature=0, stream=True))
    names = [e.type for e in events]
    middle = [n for n in names if n == "response.output_text.delta"]
    assert names == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", *middle,
                     "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == truth == events[-1].response.output_text
    # The client's own accumulation of events must come to the same end.
    with client.responses.stream(model="mini", input=picture_items(), temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == truth


def test_a_response_that_is_cut(client):
    ask = dict(model="mini", input="hi", max_output_tokens=2, extra_body=ON)
    r = client.responses.create(**ask)
    assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.usage.output_tokens == 2
    assert [e.type for e in client.responses.create(**ask, stream=True)][-1] == "response.incomplete"


def test_a_conversation_carried_by_the_client(client):
    """What came out goes in again as it is, instructions in front."""
    first = client.responses.create(model="mini", input="hi", instructions="Be brief.")
    assert first.instructions == "Be brief."
    items = [{"role": "user", "content": "hi"}, *[o.model_dump(exclude_none=True) for o in first.output], {"role": "user", "content": "and?"}]
    second = client.responses.create(model="mini", input=items, instructions="Be brief.")
    assert second.status == "completed" and second.usage.input_tokens > first.usage.input_tokens


def test_a_required_call_in_a_response(client):
    ask = dict(model="mini", input="look", tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=8, temperature=0)
    r = client.responses.create(**ask)
    assert r.output[0].type == "function_call" or r.output_text.startswith('<tool_call>\n{"name": "look"')
    assert r.tools[0].name == "look" and r.tool_choice == "required"
    done = [e for e in client.responses.create(**ask, stream=True) if e.type in ("response.completed", "response.incomplete")]
    assert done[0].response.output_text == r.output_text


@pytest.mark.parametrize("more, param", [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"), ({"extra_body": {"conversation": "c"}}, "conversation"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"), ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"), ({"max_output_tokens": 0}, "max_output_tokens")])
def test_responses_refuse_by_name(client, more, param):
    for stream in False, True:
        assert refusal(lambda: client.responses.create(**{"model": "mini", "input": "hi", "stream": stream, **more})) == (400, param, None)


def test_responses_are_not_kept(client):
    made = client.responses.create(model="mini", input="hi", store=True)
    for call in client.responses.retrieve, client.responses.delete:
        assert refusal(lambda: call(made.id)) == (404, None, "not_found")


def test_a_response_without_eyes(servers):
    client = openai.OpenAI(base_url=servers().url + "/v1", api_key="none", max_retries=0)
    assert refusal(lambda: client.responses.create(model="m", input=picture_items())) == (400, "input[0].content[0].image_url", "vision_unavailable")
    assert client.responses.create(model="m", input="hi").output_text


def test_streams_that_end_with_the_server(servers):
    """A second signal ends a stream that has begun: each API says so in its own way."""
    for api in "chat", "responses":
        server = servers(context=65536)  # long enough not to end by itself
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        if api == "chat":
            stream = client.chat.completions.create(model="m", messages=[user(text("hi"))], stream=True, extra_body=ON)
        else:
            stream = client.responses.create(model="m", input="hi", stream=True, extra_body=ON)
        events = iter(stream)
        for _ in range(6):
            next(events)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
        if api == "chat":
            with pytest.raises(openai.APIError, match="shutting down"):
                list(events)
        else:
            last = list(events)[-1]
            assert last.type == "response.failed" and last.response.status == "failed" and last.response.error.code == "shutting_down"


# ---- the documentation ----

def examples():
    """(path, body) of each request that docs/API.md shows for these APIs."""
    sections = re.split(r"^## ", (TOP / "docs/API.md").read_text(), flags=re.M)
    found = []
    for s in sections:
        head = re.match(r"POST (/v1/(?:chat/)?completions|/v1/responses)\n", s)
        found += [(head[1], json.loads(body)) for body in re.findall(r"^```json\n(.*?)^```", s, re.M | re.S)] if head else []
    return found


def test_the_examples_of_the_documentation(eyes):
    assert {path for path, _ in examples()} == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    for path, body in examples():
        status, reply = eyes.request(path, body)
        assert status == 200, (path, body, reply)


# ---- the order of pictures ----

@pytest.fixture
def two_hosts(tmp_path):
    """Vision hosts whose encoders do as a picture tells them; rows follow from the picture's bytes."""
    hosts = [lab.VisionHost(tmp_path / name) for name in ("one", "two")]
    for h in hosts:
        h.encodes = tmp_path / f"{h.tmp.name}.log"
        h.configure(encoder=str(lab.FAKE_ENCODER), extended=True, encoder_args=["--embd", "192", "--rows", "6x6", "--log", str(h.encodes)])
        h.start()
    yield hosts
    for h in hosts:
        h.stop()


def test_pictures_keep_their_places_when_hosts_finish_out_of_order(two_hosts, servers):
    server = servers(*two_hosts)
    lab.wait_for(lambda: all(h["state"] == "up" for h in server.eyes()["hosts"]), "both hosts")

    def ask(*pictures):
        """-> (prompt's tokens, those of them that were in the engine's cache, reports). That cache knows pictures by name and place."""
        content = [text("A"), image(pictures[0]), text("B"), image(pictures[1]), image(pictures[2]), text("C")]
        status, reply = server.chat(user(*content), max_tokens=1)
        assert status == 200, reply
        return reply["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["timings"]["pictures"]

    def picture(words, salt):
        return "data:;base64," + base64.b64encode(PICTURE.read_bytes() + f"FAKE {words}\n{salt}".encode()).decode()

    slow, quick, last = picture("delay=3000", "1"), picture("delay=0", "22"), picture("delay=0", "333")
    prompt, _, reports = ask(slow, quick, last)
    assert all("enc" in h.encodes.read_text() for h in two_hosts) and reports[0]["total_ms"] > reports[1]["total_ms"]
    # Now nothing is waited for: had the quick one come to stand first, its place would not be found again.
    assert ask(slow, quick, last)[1] == prompt - 1
    assert ask(quick, slow, last)[1] < prompt - 3 * 9
