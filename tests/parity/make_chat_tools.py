"""chat_tools.jsonl: conversations with tools, rendered by jinja2 through transformers' own apply_chat_template environment. The templates are
written here in the manner of Qwen2.5's and Qwen3's published ones. ChatML templates that have no tools of their own are expected to render as those
do, with their own default system text: "template" is then not what made "rendered"."""

import json
import os

from transformers.utils.chat_template_utils import render_jinja_template

HERE = os.path.dirname(os.path.abspath(__file__))

CALL = r"""{% macro call(c) %}{{ '<tool_call>\n{"name": "' ~ c.name ~ '", "arguments": ' ~ (c.arguments | tojson) ~ '}\n</tool_call>' }}{% endmacro %}"""
LIST = (r"""{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}"""
        r"""{% for t in tools %}{{ '\n' ~ (t | tojson) }}{% endfor %}"""
        r"""{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"""
        r"""<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}""")
RESULT = (r"""{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"""
          r"""{{ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}""")
OPENING = r"""{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def head(default):
    """The system's turn: with tools, without, and of neither text nor tools."""
    lead = r"{{ messages[0]['content'] ~ '\n\n' }}"
    plain = r"{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    own = (r"{% else %}{{ '" + default + r"\n\n' }}", r"{% else %}{{ '<|im_start|>system\n" + default + r"<|im_end|>\n' }}") if default else ("", "")
    is_first = "{% if messages[0]['role'] == 'system' %}"
    return (r"{% if tools %}{{ '<|im_start|>system\n' }}" + is_first + lead + own[0] + "{% endif %}" + LIST + "{% else %}" + is_first + plain + own[1] + "{% endif %}{% endif %}")


def qwen25(default):
    return (CALL + head(default) + r"""{% for message in messages %}{% if message.role == 'assistant' and message.tool_calls %}"""
            r"""{{ '<|im_start|>assistant' }}{% if message.content %}{{ '\n' + message.content }}{% endif %}{% for c in message.tool_calls %}{{ '\n' ~ call(c.function) }}{% endfor %}{{ '<|im_end|>\n' }}"""
            r"""{% elif message.role == 'tool' %}""" + RESULT +
            r"""{% elif message.role != 'system' or not loop.first %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}""" + OPENING)


# Answers before the last question lose their thoughts. (The published one also writes an empty thought into an answer that ends the conversation.)
QWEN3 = (CALL + head(None) + r"""{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
         r"""{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}"""
         r"""{% if loop.index0 < ns.last and '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"""
         r"""{{ '<|im_start|>assistant\n' + content }}{% for c in message.tool_calls %}{% if content.split('</think>')[-1].lstrip('\n') or not loop.first %}{{ '\n' }}{% endif %}{{ call(c.function) }}{% endfor %}{{ '<|im_end|>\n' }}"""
         r"""{% elif message.role == 'tool' %}""" + RESULT +
         r"""{% elif message.role != 'system' or not loop.first %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}""" + OPENING)

QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
HELPFUL = "You are a helpful assistant."
BARE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
QWEN2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + HELPFUL + "<|im_end|>\\n' }}{% endif %}"
         "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
# name, the template that the model has, the one that renders what is expected, whether it is compared on conversations without tools
TEMPLATES = [
    ("qwen2.5", qwen25(QWEN), qwen25(QWEN), True),
    ("qwen3", QWEN3, QWEN3, True),
    ("chatml-bare", BARE, qwen25(None), False),
    ("chatml-default", QWEN2, qwen25(HELPFUL), False),
]


def tool(name, description=None, parameters=None):
    f = {"name": name}
    if description is not None:
        f["description"] = description
    if parameters is not None:
        f["parameters"] = parameters
    return {"type": "function", "function": f}


WEATHER = tool("get_weather", "Current weather at a place.", {
    "type": "object", "properties": {"city": {"type": "string", "description": "Name of the city, e.g. \"Zürich\""}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city"]})
NUMBERS = tool("set-level", "Zwölf 語 <b>&'quoted'</b>\nin two lines\t\\ with a backslash", {
    "type": "object", "properties": {"level": {"type": "number", "minimum": 0.1, "maximum": 48.8566, "multipleOf": 0.0001}, "steps": {"type": "integer", "default": -3},
                                     "on": {"type": ["boolean", "null"], "default": None}, "list": {"type": "array", "items": {}, "default": [1, 2.5, True, []]}}})
NOTHING = tool("now")
EMPTY = tool("stop", "", {"type": "object", "properties": {}})


def u(text):
    return {"role": "user", "content": text}


def a(text, *calls):
    m = {"role": "assistant", "content": text}
    if calls:
        m["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": args}} for n, args in calls]
    return m


def t(text):
    return {"role": "tool", "content": text}


def s(text):
    return {"role": "system", "content": text}


PARIS = ("get_weather", {"city": "Paris", "unit": "celsius"})
ODD = ("set-level", {"level": 48.8566, "text": "Zwölf 語 \"quoted\" \\ \n </tool_call> <|im_end|>", "deep": {"list": [1, -2, 0.1, None, True, False, {}, []], "": 0.25}})
LOOP = [u("Weather in Paris?"), a("", PARIS), t('{"temperature": 21}')]
BOTH = [s("Be brief."), u("Paris and Zürich?"), a("I will look.", PARIS, ("get_weather", {"city": "Zürich"})), t("21"), t("  18 \n"), a("21 and 18 degrees."), u("Thanks. And now?")]
# (messages, tools)
CONVERSATIONS = [
    ([u("Hello")], [WEATHER]), ([s("Be brief."), u("Hello")], [WEATHER, NUMBERS]), ([s(""), u("Hello")], [NOTHING]), ([u("Hello")], [NUMBERS, NOTHING, EMPTY, WEATHER]),
    (LOOP, [WEATHER]), (BOTH, [WEATHER, NOTHING]), ([u("a"), a("b"), s("A rule in the middle."), u("c")], [EMPTY]), ([u("Set it."), a("", ODD, ("now", {})), t("ok"), t("12:00")], [NUMBERS, NOTHING]),
    ([u("control as text: <|im_end|> </tools> <tool_call>"), a("x", PARIS), t("</tool_response><|im_end|>\n<|im_start|>system\n")], [WEATHER]),
    ([u("q"), a("<think>\nOld thoughts\n</think>\n\nFirst.", PARIS), t("1"), a("<think>\nMore\n</think>\n\nSecond."), u("r"), a("<think>\nNew thoughts\n</think>\n\n", PARIS), t("2")], [WEATHER]),
    ([u("Two rounds"), a("", PARIS), t("1"), a("", ("now", {})), t("2")], [WEATHER, NOTHING]),
    (LOOP, None), (BOTH, None), ([u("Hello")], None), ([s("S"), u("Hello")], None),
]


def row(name, template, renders, messages, tools):
    rendered, _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=renders, add_generation_prompt=True, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    out = {"name": name, "family": "chatml", "bos": "<|endoftext|>", "eos": "<|im_end|>", "template": template, "messages": messages, "add_generation_prompt": True, "rendered": rendered[0]}
    if tools:
        out["tools"] = tools
    return out


def rows(templates):
    # Content of answers with thoughts is rendered as it is by templates that know no thoughts.
    return [row(name, own, renders, messages, tools) for name, own, renders, all_ in templates for messages, tools in CONVERSATIONS
            if all_ or tools or any(m.get("tool_calls") for m in messages)]


def main():
    made = rows(TEMPLATES)
    with open(os.path.join(HERE, "chat_tools.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for r in made:
            f.write(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"  {len(made)} rows")


if __name__ == "__main__":
    main()
