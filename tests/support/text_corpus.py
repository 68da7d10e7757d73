"""A mixed corpus for tokenizers: deterministic, written here, and the same on every Python.

Every item is spelled in bytes that any byte-level vocabulary has; the few control characters and
planes that small vocabularies lack are tested on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from random import Random

import numpy as np

_SENTENCES = (
    "The quick brown fox can't jump; it's lazier than we'd thought, I'll admit, and they've lost.",
    "WE'RE SHOUTING: DON'T, I'M, YOU'LL, HE'D, SHE'S, THEY'VE. 'tis o'clock rock'n'roll ''quoted''",
    "I paid $1,234.56 on 2024-02-29 at 07:05, i.e. 3.14159e-10 of 1000000 (or 0x1F4A9, 0b1011, 1_000).",
    "1 12 123 1234 12345 123456 1234567 00000000 ١٢٣٤٥ १२३ ２０２４ ½ Ⅷ ²³ ①②③",
    "Straße, naïve café, Ångström, señor, crème brûlée, İstanbul, ﬁne, ſtrange 'ſ 'S K",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 (combining) versus é ä ñ ộ (composed)",
    "Привет, как дела? Съешь ещё этих мягких булок. Україна, Ђорђе, Қазақстан",
    "Καλημέρα κόσμε, τι κάνεις σήμερα; Ἀρχιμήδης",
    "שלום עולם, מה נשמע? בְּרֵאשִׁית",
    "مرحبا بالعالم، كيف حالك؟ الْعَرَبِيَّة ـــ",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय ज्ञान",
    "বাংলা ভাষা, தமிழ் மொழி, తెలుగు, ಕನ್ನಡ, മലയാളം, ગુજરાતી, ਪੰਜਾਬੀ",
    "สวัสดีชาวโลก วันนี้อากาศดี ຂໍໃຫ້ໂຊກດີ မင်္ဂလာပါ ភាសាខ្មែរ",
    "你好，世界！今天天气怎么样？我们去吃饭吧。「引用」、《书名》……",
    "こんにちは世界。カタカナとひらがなと漢字、ﾊﾝｶｸ、ー長音。",
    "안녕하세요 세계, 오늘 날씨가 어때요? 한글 ㅋㅋㅋ ㅠㅠ",
    "ქართული ენა, Հայերեն, አማርኛ, ᏣᎳᎩ, ᐃᓄᒃᑎᑐᑦ, བོད་སྐད་",
    "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈 🇩🇪🇯🇵 ❤️ ☺︎ 1️⃣ 🤷🏿‍♀️ 😀😃😄 🫠",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒎𝒂𝒕𝒉 𝟙𝟚𝟛 𓀀𓁐 𐍈𐌰 🂡 𠜎𠜱",
    "«guillemets» “curly” ‘quotes’ – en — em … • † ‡ ¶ § © ® ™ € £ ¥ ₹ ∑ ∫ √ ≠ ≤ ∞ → ⇒ ∀ ∃",
    "zero\u200bwidth\u200cjoin\u200ders\u2060 and \ufeffbom, nbsp\u00a0in, \u3000wide, \u2028line\u2029para",
    "https://example.org/a/b.html?q=1&r=%20x#frag mailto:a.b+c@d-e.co ../../etc/*.{c,h} C:\\dir\\file.txt",
    "!!! ??? ... --- === +++ ### *** ~~~ ``` ||| <<< >>> $$$ ^^^ && || != == -> => ::= <=> ?. ?? //",
    "a <b> </b> <table> <tr><td>1</td></tr> </table> <h1>T</h1> <em>e</em> [x](y) {{z}} {%- if -%}",
)
_CODE = (
    'def add(a: int, b: int = 2) -> int:\n    """Sum."""\n\n    return a+b  # it\'s ok\n\n\nprint(add(1))\n',
    'int main(void) {\n\tfor (int i = 0; i < 10; ++i) {\n\t\tprintf("%d\\n", i);\n\t}\n\treturn 0;\n}\n',
    "SELECT u.id, COUNT(*) AS n\nFROM users u\nWHERE u.name LIKE 'O''Neil%'\nGROUP BY 1\nHAVING n >= 10;\r\n",
    '{"key": [1, 2.5e3, null, true], "nested": {"a\\u00e9": "\\n\\t\\"x\\""}}\r\n\r\n',
    "const f = async (x) => { await g(`${x}`); return x?.y ?? 'z' };\n// TODO: l'été\n",
    '#!/bin/sh\nset -eu\nfor f in *.txt; do\n  [ -s "$f" ] && sed -e \'s/a\\+/b/g\' "$f" | sort -u\ndone\n',
    "<?xml version='1.0'?>\n<a href=\"#\">\n    <b/>\n\n    <!-- c -->\n</a>\n",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n\n- item\n  - sub\n\n> quote\n\n1. x\n2. y\n",
)
_SPECIAL = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> <|im_end|><|im_end|>",
    "<s>[INST] a [/INST] b</s> <unk> <pad> <bos> <eos> <mask>",
    "<start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n",
    "<|eot_id|><|begin_of_text|><|start_header_id|>x<|end_header_id|>",
    "<|im_en|> <|im_end| > < |im_end|> |im_end|> <<|im_end|>> <|im_<|im_end|>end|>",
    "<tool_call>{}</tool_call> <repo_name>x<file_sep> <jupyter_code> <empty_output>",
    "<0x0A> <0x41> [PAD151665] [multimodal] <unused0> ▁ ▁▁ Ġ Ċ Â",
)
_SPACES = (
    *(" " * n for n in (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 100)),
    *("\n" * n for n in (1, 2, 3, 4, 10, 31, 40)),
    *("\t" * n for n in (1, 2, 3, 8)),
    " \n",
    "\n ",
    "  \n  \n",
    "\r\n\r\n",
    "\r\r\n",
    " \t \n\t ",
    "\v\f\u0085",
    "\u00a0\u00a0 \u2003\u3000",
)
_RANGES = (  # inclusive, old and settled in Unicode
    (0x20, 0x7E),
    (0xA1, 0x17F),
    (0x391, 0x3A1),
    (0x3B1, 0x3C9),
    (0x410, 0x44F),
    (0x5D0, 0x5EA),
    (0x621, 0x63A),
    (0x905, 0x939),
    (0xE01, 0xE2E),
    (0x3041, 0x3093),
    (0x30A1, 0x30F6),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0x2190, 0x21FF),
    (0x2600, 0x26FF),
    (0x1F600, 0x1F64F),
    (0x20000, 0x20100),
)
_CONTROLS = "\x00\x01\x02\x03\x05\x07\x08\x0b\x0c\x0e\x1b\x7f\x80\x9f"


def corpus() -> list[str]:
    """Return the texts, always in the same order."""
    random = Random(20240607)
    texts = ["", *_SENTENCES, *_CODE, *_SPECIAL, *_SPACES]
    texts += [f"a{space}b" for space in _SPACES] + [f"{space}x" for space in _SPACES]
    texts += [f"x{space}" for space in _SPACES] + [f"{space}'s 1{space}!" for space in _SPACES]
    texts += [f"x{control}y {control}{control}" for control in _CONTROLS]
    texts += [" " + text for text in _SENTENCES]
    texts += [_jumble(random) for _ in range(200)]
    texts += [_splice(random) for _ in range(100)]
    texts.append("".join(_SENTENCES) * 3 + "".join(_CODE) * 3)
    return texts


def digest(ids: Sequence[int]) -> str:
    """Return a short hash of token ids."""
    return sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:12]


def _pick(random: Random, values: Sequence[str]) -> str:
    return values[random.randrange(len(values))]


def _jumble(random: Random) -> str:
    """Words of random characters, mostly of one script each."""
    words = []
    for _ in range(random.randrange(1, 12)):
        low, high = _RANGES[random.randrange(len(_RANGES))]
        words.append("".join(chr(random.randrange(low, high + 1)) for _ in range(random.randrange(1, 9))))
        words.append(_pick(random, (" ", " ", "", *_SPACES, "'s", "123", "\u0301", "!", "\u200d")))
    return "".join(words)


def _splice(random: Random) -> str:
    """Slices of everything above, cut anywhere."""
    parts = []
    for _ in range(random.randrange(2, 6)):
        text = _pick(random, (*_SENTENCES, *_CODE, *_SPECIAL))
        start = random.randrange(len(text))
        parts.append(text[start : start + random.randrange(1, 40)])
    return "".join(parts)
