"""The awkward strings that all tokenizer goldens share, and the corpus that their small vocabularies are trained on. Both are drawn
from fixed seeds. NUL is left out (JSON readers may refuse it), and so is U+017F after an apostrophe, where published patterns
with (?i:...) and their spelled-out twins differ."""

import itertools
import random
import unicodedata

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.", "What colour is the small circle in the upper left corner?", "I'm sure they've said we'll do it; he'd go, isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.", "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia.", "Pchnąć w tę łódź jeża lub ośm skrzyń fig.", "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Árvíztűrő tükörfúrógép.", "Съешь же ещё этих мягких французских булок, да выпей чаю.", "Жебракують філософи при ґанку церкви в Гадячі.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.", "דג סקרן שט בים מאוכזב ולפתע מצא חברה", "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر", "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না।", "நான் கண்ணாடி சாப்பிடுவேன்", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า", "いろはにほへと ちりぬるを わかよたれそ つねならむ", "カタカナとひらがなと漢字が混ざった文です。",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。", "图片里有一个红色的圆形和两个蓝色的正方形。", "키스의 고유조건은 입술끼리 만나야 하고", "ქართული ენა მშვენიერია", "Հայերեն լեզուն գեղեցիկ է", "ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ", "አማርኛ ቋንቋ ነው",
    "Ngày mai trời sẽ nắng đẹp ở Hà Nội.", "İstanbul'da ışıklar yanıyor, ŞIK bir gece.", "Γειά σου Κόσμε! ΌΧΙ", "def f(x):\n\treturn {'a': x**2, \"b\": [1, 2.5e-3]}  # ok\n",
    "int main(void)\n{\n    printf(\"%d\\n\", 0x1F);\r\n    return 0;\n}", "<html><body class=\"x\">&amp; &lt;</body></html>", "SELECT * FROM t WHERE a >= 10 AND b != 'x';", "https://example.org/a/b?c=1&d=%20#frag user@example.org",
    "2024-02-29T23:59:59.999Z +49 (0)30 123456-78, 1,234,567.89 €", "C:\\Users\\name\\file.txt and /usr/share/doc", "snake_case camelCase kebab-case SCREAMING_CASE v1.2.3-rc4", "##  Heading\n\n* item\n  1. sub\n\n> quote\n```c\nx++;\n```",
]

# First and last code point of the scripts that are sampled.
BLOCKS = [(0x41, 0x7A), (0xC0, 0x24F), (0x250, 0x2AF), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58A), (0x5D0, 0x5F4), (0x600, 0x6FF), (0x710, 0x74A), (0x780, 0x7B1), (0x7C0, 0x7FA),
          (0x900, 0x97F), (0x980, 0x9FE), (0xA01, 0xA76), (0xA81, 0xAF1), (0xB85, 0xBFA), (0xC00, 0xC7F), (0xD00, 0xD7F), (0xE01, 0xE5B), (0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF),
          (0x1200, 0x137C), (0x13A0, 0x13F5), (0x1401, 0x1676), (0x16A0, 0x16F8), (0x1780, 0x17F9), (0x1800, 0x18AA), (0x1E00, 0x1EFF), (0x1F00, 0x1FFE), (0x2C00, 0x2C5F), (0x2D30, 0x2D70), (0x3041, 0x30FF),
          (0x3105, 0x312F), (0x4E00, 0x9FFF), (0xA000, 0xA48C), (0xA4D0, 0xA4FF), (0xAC00, 0xD7A3), (0xFB50, 0xFDFB), (0xFF01, 0xFFEE), (0x10330, 0x1034A), (0x10400, 0x1044F), (0x12000, 0x12399),
          (0x13000, 0x1342E), (0x1D400, 0x1D7FF), (0x20000, 0x2A6DF), (0x1E900, 0x1E959)]
SPACES = [" ", "  ", "\t", "\n", "\r", "\r\n", "\n\n", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\x1c", "\x1f"]
INVISIBLE = ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e", "\u061c", "\u202e", "\ufe0f", "\u034f"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"]
DIGITS = [0x30, 0x660, 0x6F0, 0x966, 0x9E6, 0xE50, 0xF20, 0x1040, 0x17E0, 0x1810, 0xFF10, 0x1D7CE, 0x1E950]
NUMBERISH = "²³¹¼½¾⅓ⅷⅫ①⑳⓿㊿㉈一二三百〇๏৴௧፩𐄇🄁𝟠"
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "🇩🇪🇫🇷", "1️⃣", "#️⃣", "❤️", "❤", "👨🏿‍🚀", "🧑‍🤝‍🧑", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "☎", "©", "™", "🪐", "🫠", "𓀀", "♟️", "〰️"]
MARKS = ["\u0301", "\u0308", "\u0323", "\u20dd", "\u093c", "\u0651", "\u05b0", "\u3099", "\u1ab0", "\u0489", "\U0001D165"]
PUNCT = ["!", "...", "?!", "--", "—", "“”", "«»", "'", "''", "’", "`", "´", "$", "€", "₹", "+", "<=", "^", "~", "|", "°", "§", "¿", "、", "。", "，", "·", "_", "__", "()", "[]", "{}", "\\", "/", "%", "@", "#", "&&", "*", "‰", "∑", "√", "→", "█"]
CODES = [0xFFFE, 0xFFFF, 0xFDD0, 0x1FFFE, 0x10FFFF, 0xE000, 0xF8FF, 0xF0000, 0x10FFFD, 0xFFFD, 0x378, 0x1, 0x7, 0x8, 0x1B, 0x7F, 0x80, 0x9F, 0x2581, 0x120, 0x10A, 0x149, 0x130, 0x131, 0xDF, 0x1E9E, 0xFB01,
         0x2126, 0x212A, 0x3A9, 0x1D00, 0x2160, 0x24B6, 0x3007, 0x16EE, 0x2E2F, 0xAA, 0xBA, 0x2B0, 0x559, 0x640, 0x903, 0x20E3, 0xFE0E, 0xE0041, 0xE01EF, 0x1F1E6, 0x200E, 0x115F, 0x3164, 0xFFA0, 0x2FF0, 0x303E]
# The control tokens of the trained vocabularies; user-defined ones are always one token.
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPM_CONTROL = ["<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]


def assigned(cp):
    return unicodedata.category(chr(cp)) not in ("Cn", "Cs", "Co")


def block_word(r, block, lo=1, hi=7):
    cps = [cp for cp in (r.randint(*block) for _ in range(60)) if assigned(cp)]
    return "".join(map(chr, cps[:r.randint(lo, hi)]))


def words(r):
    return r.choice(SENTENCES).split(" ")


def corpus():
    """About 4,000 lines; common words repeat, so that merges of several lengths arise in several scripts."""
    r = random.Random(1)
    lines = SENTENCES * 12
    for _ in range(2400):
        lines.append(" ".join(r.choice(words(r)) for _ in range(r.randint(3, 14))))
    for block in BLOCKS:
        pool = [block_word(r, block, 2, 6) for _ in range(6)]
        lines += [" ".join(r.choice(pool) for _ in range(5)) for _ in range(6)]
    for _ in range(150):
        lines.append(r.choice(["  ", "    ", "\t", "        "]) + r.choice(SENTENCES) + r.choice(["", "\n", "\n\n", "  \n"]))
    lines += [str(r.randint(0, 10 ** r.randint(1, 6))) + " " + r.choice(EMOJI) for _ in range(300)]
    r.shuffle(lines)
    return lines


def _words(r, out):
    for block in BLOCKS:
        for i in range(9):
            sep = r.choice([" ", " ", "  ", ", ", "-", "'", "\n", "\u3000", "1", ""])
            out.append(sep.join(block_word(r, block) for _ in range(r.randint(1, 5))))
    for _ in range(150):
        a, b = r.sample(BLOCKS, 2)
        out.append(block_word(r, a) + block_word(r, b) + r.choice(["", " ", "7"]) + block_word(r, a))


def _spaces(r, out):
    for sp in SPACES:
        out += [sp, sp * 2, sp * 3, "a" + sp, sp + "a", "a" + sp + "b", "a" + sp * 2 + "b", " " + sp + "a", sp + " 1", sp + "!", "." + sp + "\n" + sp + "x"]
    for a, b in itertools.product(SPACES, repeat=2):
        out.append("x" + a + b + r.choice(["y", "9", "?", "é", ""]))
    for _ in range(160):
        out.append("".join(r.choice(SPACES + ["word", "Ω", "12", "…", "語"]) for _ in range(r.randint(3, 9))))
    for z in INVISIBLE:
        out += [z, "a" + z + "b", " " + z + " ", z + "1", "\n" + z + "\n"]


def _contractions(r, out):
    for c in CONTRACTIONS:
        for v in dict.fromkeys((c, c.upper(), "'" + c[1:].capitalize(), c.replace("'", "’"))):
            out += ["it" + v, "IT" + v + " x", v, " " + v, "5" + v, "a'" + v, "é" + v + "9", "語" + v]
        out.append("x" + c + c + "tra" + c)


def _numbers(r, out):
    for zero in DIGITS:
        for n in (1, 2, 3, 4, 7):
            d = "".join(chr(zero + r.randint(0, 9)) for _ in range(n))
            out += [d, r.choice(["a", " ", "€", "x ", "第"]) + d + r.choice(["", "b", " ", ".", "\n"])]
    out += list(NUMBERISH) + ["a" + c + "1" + c for c in NUMBERISH] + [NUMBERISH, "3.14159", "1e10", "0xDEADBEEF", "1,000,000", "12:34:56", "x2y3z45", "4th 21st", "1/2", "−5", "+ 7"]


def _symbols(r, out):
    out += EMOJI + ["a" + e + "b" for e in EMOJI] + [" " + e + e + " " for e in EMOJI] + ["".join(EMOJI)]
    for m in MARKS:
        out += [m, "e" + m, "e" + m + m + "x", " " + m, "1" + m, "." + m, "क" + m + "ष", "\n" + m]
    out += ["Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞", "cafe\u0301 café", "각 각 ㄱㅏㄱ"]
    for p in PUNCT:
        out += [p, " " + p, "a" + p + "b", "a " + p + " b", p + "\n\n", p * 3 + "1"]
    for cp in CODES:
        c = chr(cp)
        out += [c, "a" + c + "b", " " + c + "7"]


def _control(r, out):
    for t in CONTROL + SPM_CONTROL + USER_DEFINED:
        out += [t, " " + t, t + " ", "a" + t + "b", "a " + t + " b", t + t, t + "\n" + t, t[:-1], t[1:], t.upper(), t.replace("|", " |"), "\n" + t + "\n\n", t + "é", "<" + t + ">"]
    out += ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "x<|im_start|><|im_end|>y<s>z</s>", "<|im_<|im_start|>start|>", "[INST] a [/INST]", "<0x41>", "<0x0A><0xFF>", "▁", "▁▁a▁b", "a ▁ b", "Ġa", "ĠĊ", "<unk>", "a<unk>b",
            "<|vision_start|><|image_pad|><|vision_end|>", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>"]


def _random(r, out):
    for _ in range(330):
        cps = (r.choice([r.randint(0x21, 0x7E), r.randint(0xA1, 0x2FFF), r.randint(0x3001, 0xD7FF), r.randint(0x10000, 0x1FFFF)]) for _ in range(r.randint(2, 14)))
        out.append("".join(chr(cp) for cp in cps if assigned(cp)))
    for _ in range(200):
        out.append("".join(chr(r.randint(0x20, 0x7E)) for _ in range(r.randint(2, 24))))
    for _ in range(120):
        out.append(r.choice(["", " ", "\n"]).join(r.choice(words(r)) for _ in range(r.randint(2, 8))))
    out += [" " * 700 + "x", "\n" * 300, "\t \n" * 120, "a" * 600, "ab" * 300, "7" * 400, "!" * 400, "é" * 300, "語" * 200, "👍" * 150, "\u3000" * 200, "e" + "\u0301" * 150, "'s" * 150, "the " * 150]


def strings():
    r = random.Random(2)
    out = [""] + list(SENTENCES) + [" " + s for s in SENTENCES[:12]] + [s.upper() for s in SENTENCES[:12]]
    for part in (_words, _spaces, _contractions, _numbers, _symbols, _control, _random):
        part(r, out)
    return list(dict.fromkeys(out))
