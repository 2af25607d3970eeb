"""Templates render as transformers renders them, and cannot do anything else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gristmill.quant.checkpoints.chat_files import directory_chat_files, gguf_chat_files
from gristmill.quant.errors import ConfigError
from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.chat.conversation import ChatOptions, Message, Tool, ToolCall
from gristmill.runtime.chat.template import ChatTemplate, TemplateRefusal
from gristmill.runtime.errors import UsageError
from gristmill.runtime.tokenizer import Tokenizer
from tests.runtime.oracle import LLAMA, MODELS

MODEL = MODELS / LLAMA
CHATML = (
    "{%- if tools %}\n{{- '<|im_start|>system\\n' }}\n{%- for tool in tools %}\n{{- tool | tojson }}\n{%- endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'assistant' and message.tool_calls %}\n"
    "        {%- for call in message.tool_calls %}\n"
    "{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson(indent=2)) + '</tool_call>' }}\n"
    "        {%- endfor %}\n    {%- else %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% set ns = namespace(last=none) %}{% for m in messages %}{% if loop.index0 > 20 %}{% break %}{% endif %}"
    "{% set ns.last = m.role %}<|start|>{{ m['role'] }}<|end|>\n\n{% generation %}{{ m['content'] | trim }}{% endgeneration %}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}{# {{ ns.last }} #}"
)
ALTERNATING = (
    "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- if m.role == 'user' -%}[INST] {{ m.content }} [/INST]{%- else -%} {{ m.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)
REASONING = (
    "{%- for m in messages %}{{ '<' + m.role + '>' }}{%- if m.reasoning_content is defined and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}\n{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA_LIKE, "alternating": ALTERNATING, "reasoning": REASONING}
TALK = [
    Message("user", "  What is <b>☃</b> & co?\n"),
    Message("assistant", "Snow.", reasoning="A snowman."),
    Message("user", "{{ 7 * 7 }}"),
    Message("assistant", "", tool_calls=(ToolCall("1", "look", '{"city": "Zürich", "n": [1, 2]}'),)),
]
TOOLS = (Tool("look", "Look <out>.", {"type": "object", "properties": {"city": {"type": "string"}}}),)
DOUBLING = "{%% set ns = namespace(x='ab') %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(template: str | None, **options: Any) -> Chat:
    """Conversations by a template."""
    return Chat(MODEL, Tokenizer(MODEL), template=template, **options)


def as_transformers(
    template: str, messages: list[Message], tools: tuple[Tool, ...], prompt: bool, **more: Any
) -> str:
    """The prompt that transformers makes."""
    entries: list[dict[str, Any]] = []
    for one in messages:
        entry: dict[str, Any] = {"role": one.role, "content": one.content}
        if one.reasoning:
            entry["reasoning_content"] = one.reasoning
        if one.tool_calls:
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "id": c.id,
                    "function": {"name": c.name, "arguments": json.loads(c.arguments)},
                }
                for c in one.tool_calls
            ]
        entries.append(entry)
    shown = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
        }
        for t in tools
    ]
    [text], _ = render_jinja_template(
        [entries], tools=shown or None, chat_template=template, add_generation_prompt=prompt, **more
    )
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_prompts_are_those_of_transformers(name: str, count: int, tools: tuple[Tool, ...]) -> None:
    """Blanks, JSON, loops, blocks of training, special tokens."""
    ours = ChatTemplate(TEMPLATES[name], name)
    made = chat(TEMPLATES[name])
    made._tokens = TOKENS
    assert ours.text == TEMPLATES[name]
    for begun in (True, False):
        want = as_transformers(TEMPLATES[name], TALK[:count], tools, begun, **TOKENS)
        options = ChatOptions(tools=tools, add_generation_prompt=begun)
        assert made.render(TALK[:count], options) == want


def test_thinking_is_a_variable_of_the_template() -> None:
    """None leaves it undefined."""
    made = chat(REASONING)
    talk = TALK[:1]
    assert made.render(talk, ChatOptions(reasoning=False)).endswith("<think></think>")
    assert made.render(talk).endswith("<assistant>")
    assert made.render(talk, ChatOptions(template_arguments={"enable_thinking": False})).endswith(
        "<think></think>"
    )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self", "range"])
def test_variables_that_are_no_arguments(name: str) -> None:
    """What a conversation sets itself is not silently something else."""
    with pytest.raises(UsageError, match=f"sets {name} of its template"):
        chat(CHATML).render(TALK[:1], ChatOptions(template_arguments={name: []}))


def test_ids_have_no_second_begin_token() -> None:
    """The template's own is the only one."""
    made = chat("<x>{{ messages[0].content }}")
    tokenizer = Tokenizer(MODEL)
    assert made.encode([Message("user", "The index")]) == tokenizer.encode(
        "<x>The index", add_special_tokens=False
    )


def test_the_last_message_is_continued() -> None:
    """Without what closes it."""
    talk = [Message("user", "Count."), Message("assistant", "One, two, ")]
    text = chat(CHATML).render(talk, ChatOptions(continue_final=True))
    assert text.endswith("<|im_start|>assistant\nOne, two,")
    with pytest.raises(UsageError, match="last message of the assistant"):
        chat(CHATML).render(talk[:1], ChatOptions(continue_final=True))


def test_refusals() -> None:
    """The template's words; no template; wrong arguments; syntax."""
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        chat(ALTERNATING).render([TALK[0], TALK[0]])
    with pytest.raises(UsageError, match="no chat template"):
        chat(None).render(TALK[:1])
    with pytest.raises(UsageError, match="not JSON"):
        chat(CHATML).render([Message("assistant", tool_calls=(ToolCall("1", "f", "{oops"),))])
    with pytest.raises(UsageError, match="JSON object"):
        chat(CHATML).render([Message("assistant", tool_calls=(ToolCall("1", "f", "[1]"),))])
    with pytest.raises(UsageError, match="is wrong"):
        chat("{% for %}")
    with pytest.raises(UsageError, match=r"did you mean plain\?"):
        chat(CHATML, output_format="plane")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(900) %}{% for j in range(900) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ messages | attr('__class__') }}{{ undefined_name.x }}",
        "{{ lipsum.__globals__ }}",
        DOUBLING % "ns.x ~ ns.x",
        DOUBLING % "ns.x + ns.x",
        DOUBLING % "[ns.x, ns.x]",
        DOUBLING % "ns.x * ns.x | length",
        DOUBLING.replace("'ab'", "99") % "ns.x * ns.x",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
        "{% set l = range(10000) | list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in '0123456789' %}" * 14 + "{% endfor %}" * 14,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ '{:>2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ 'a'.ljust(4000000000) }}",
        "{{ ('\t' * 1000000).expandtabs(tabsize=2000000000) }}",
        "{{ (1).to_bytes(1000000000000000, 'big') }}",
        "{{ (1).to_bytes(byteorder='big', length=1000000000000000) }}",
        "{% set x = ('f' * 4000000) | int(0, 16) %}{% set y = ('f' * 2000000) | int(0, 16) %}{{ x // y }}",
        "{% set b = ('f' * 2000000).encode() %}{{ (1).from_bytes(b + b, 'big') // (1).from_bytes(b, 'big') }}",
        "{{ ('a' * 10000000) | wordwrap(1) }}",
        "{{ 'a\nb' | indent(2000000000) }}",
        "{{ {'a': 1} | tojson(indent=2000000000) }}",
        "{{ [1] | slice(2000000000) | list }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ x.join(x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ x | join(x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ [x] * 1000000 }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 1000000) | tojson | length }}",
    ],
)
def test_a_template_can_do_no_harm(attack: str) -> None:
    """It is refused within seconds and a gigabyte, and nothing of it runs."""
    begin = time.monotonic()
    with pytest.raises(UsageError):
        chat(attack).render(TALK[:1])
    assert time.monotonic() - begin < 60


def test_what_templates_do_is_within_the_limits() -> None:
    """Loops in loops, texts that grow, and every operation that is counted, over a long conversation."""
    template = (
        "{% set ns = namespace(text='', roles=[]) %}{% for m in messages %}{% set ns.roles = ns.roles + [m.role] %}"
        "{% for word in m.content.split() | map('upper') %}{% set ns.text = ns.text ~ word + ' ' %}{% endfor %}"
        "{% for other in messages[:5] %}{{ other.role | replace('u', 'U') | indent(2) }}{% endfor %}{% endfor %}"
        "{{ ns.text | trim }} {{ '%03d|%s' | format(7, 'x') }} {{ '{:>4}'.format(2) }} {{ ns.roles | unique | join(', ') }} {{ 'a' * 3 }}"
        "{{ ns.roles[::-1] | batch(2) | list | tojson(indent=1) }}{{ [1, 2] | sum }}{% for k, v in {'a': (1, 2)}.items() %}{{ k }}{{ v }}{% endfor %}"
    )
    talk = [Message("user" if i % 2 == 0 else "assistant", f"word {i}") for i in range(1000)]
    assert chat(template).render(talk) == as_transformers(template, talk, (), True)


def test_files_of_a_directory(tmp_path: Path) -> None:
    """chat_template.jinja comes first; several named ones; token texts as objects; wrong ones are named."""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "default", "template": "a"},
                    {"name": "tool_use", "template": "b"},
                ],
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "pad_token": None,
            }
        )
    )
    files = directory_chat_files(tmp_path)
    assert files.templates == {"default": "a", "tool_use": "b"}
    assert files.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert directory_chat_files(tmp_path).templates == {"default": "c", "tool_use": "b"}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ConfigError, match="chat_template must be"):
        directory_chat_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        directory_chat_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        directory_chat_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "additional_chat_templates" / "pipe.jinja")
    with pytest.raises(ConfigError, match=r"pipe\.jinja: it is no regular file"):
        directory_chat_files(tmp_path)


def test_fields_of_a_gguf_file() -> None:
    """The template, named ones, and tokens by their numbers; a number outside the vocabulary is no token."""
    fields = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 7,
    }
    files = gguf_chat_files(fields, "f")
    assert files.templates == {"default": "a", "tool_use": "b"}
    assert files.tokens == {"bos_token": "<s>"}
    with pytest.raises(ConfigError, match="must be text"):
        gguf_chat_files({"tokenizer.chat_template": 1}, "f")
