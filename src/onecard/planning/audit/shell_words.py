"""A shell script as statements of words, not yet expanded: quotes, comments, continued lines, arrays, here-documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from onecard.errors import PlanError

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_ENDS = ("&&", "||", ";;", ";", "|", "&", ")", "(", "\n")
_PAIRS = {"(": ")", "{": "}"}


@dataclass
class Word:
    """A word as it is written, with its line; items of an array, if it assigns one."""

    text: str
    line: int
    items: list[Word] | None = None


@dataclass
class Statement:
    """Words, and what they end with: a line's end, ";", "&&", ..."""

    words: list[Word] = field(default_factory=list)
    end: str = "\n"


def statements(text: str, name: str) -> list[Statement]:
    """Takes a script apart.

    Raises:
        PlanError: a quote or a bracket that is not closed, by its line.

    Example:
        >>> [[word.text for word in s.words] for s in statements("A=1 # one\\nrun --x \\\\\\n  'a b' $A; C=(1 2)", "x.sh")]
        [['A=1'], ['run', '--x', "'a b'", '$A'], ['C=(']]
    """
    return _Script(text.replace("\r\n", "\n"), name).read()


class _Script:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at, self.line = text, name, 0, 1
        self.documents: list[str] = []  # words that end here-documents which begin with the next line

    def read(self) -> list[Statement]:
        found: list[Statement] = []
        statement = Statement()
        while self.at < len(self.text):
            end = self.separator()
            if end:
                statement.end = end
                if statement.words or end in (")", ";;"):
                    found.append(statement)
                statement = Statement()
            elif self.at < len(self.text):
                word = self.word()
                if word is not None:
                    statement.words.append(word)
        return [*found, statement] if statement.words else found

    def separator(self) -> str:
        """Skips what is between words; gives what ends a statement, if that comes next."""
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif here == "#":
                self.at = self.end_of_line()
            else:
                break
        end = next((end for end in _ENDS if self.text.startswith(end, self.at)), "")
        self.at += len(end)
        if end == "\n":
            self.line += 1
            self.skip_documents()
        return end

    def end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def skip_documents(self) -> None:
        for last in self.documents:
            while self.at < len(self.text):
                end = self.end_of_line()
                line, self.at, self.line = self.text[self.at : end], end + 1, self.line + 1
                if line.strip("\t") == last:
                    break
        self.documents = []

    def word(self) -> Word | None:
        """The next word; None for a redirection."""
        begin, line = self.at, self.line
        redirected = re.compile(r"\d*(?:>>|>&|>|<<<|<<-|<<|<&|<)").match(self.text, self.at)
        if redirected is not None:
            self.at = redirected.end()
            self.redirect(redirected[0].lstrip("0123456789"))
            return None
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t\r\n;|&<>" or (here in "()" and not self.opens_array(begin)):
                break
            if here == "(":
                self.at += 1
                return Word(self.text[begin : self.at], line, self.items(line))
            self.skip_part()
        if self.at == begin:
            self.at += 1  # a bracket by itself
        return Word(self.text[begin : self.at], line)

    def opens_array(self, begin: int) -> bool:
        return self.text[self.at] == "(" and _ARRAY.fullmatch(self.text, begin, self.at + 1) is not None

    def redirect(self, kind: str) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        target = self.word() if self.at < len(self.text) and self.text[self.at] not in "\n;|()<>" else None
        if kind in ("<<", "<<-") and target is not None:
            self.documents.append(target.text.strip("'\"\\"))

    def items(self, line: int) -> list[Word]:
        """Of an array, up to its bracket."""
        found: list[Word] = []
        while self.at < len(self.text):
            end = self.separator()
            if end == ")":
                return found
            if not end and self.at < len(self.text):
                word = self.word()
                if word is not None:
                    found.append(word)
        raise PlanError(f"{self.name}:{line}: the array's bracket is not closed; write ) at its end")

    def skip_part(self) -> None:
        """One part of a word: a quoted text, an expansion, or a character."""
        here = self.text[self.at]
        if here == "\\":
            self.line += self.text[self.at : self.at + 2].count("\n")
            self.at += 2
        elif here in "'\"`":
            self.quoted(here)
        elif here == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
            self.nested()
        else:
            self.at += 1

    def quoted(self, quote: str) -> None:
        line, self.at = self.line, self.at + 1
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == quote:
                self.at += 1
                return
            if quote == '"' and here == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self.nested()
                continue
            step = 2 if here == "\\" and quote != "'" else 1
            self.line += self.text[self.at : self.at + step].count("\n")
            self.at += step
        raise PlanError(f"{self.name}:{line}: the quote {quote} is not closed")

    def nested(self) -> None:
        """``$( )`` or ``${ }``, with what is within."""
        line, sign, opened = self.line, self.text[self.at : self.at + 2], [_PAIRS[self.text[self.at + 1]]]
        self.at += 2
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == opened[-1]:
                opened.pop()
                self.at += 1
                if not opened:
                    return
            elif here in "'\"`" and not (here == "'" and opened[-1] == "}"):
                self.quoted(here)
            else:
                if here in _PAIRS and (here == "(" or self.text[self.at - 1] == "$"):
                    opened.append(_PAIRS[here])
                self.line += here == "\n"
                self.at += 1
        raise PlanError(f"{self.name}:{line}: the bracket of {sign} is not closed")
