//! Text into tokens, one at a time, without copies. Knows no directive and no instruction.

use crate::error::Refused;

/// A piece of the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Token<'a> {
    /// A name, with `%`, `$` and `_` as PTX has them.
    Name(&'a str),
    /// `.name`, without the dot; `::` may be within.
    Dot(&'a str),
    /// A whole number.
    Integer(u64),
    /// A binary32 by its bits.
    Single(u32),
    /// A binary64 by its bits; decimal fractions are these, too.
    Double(u64),
    /// `"…"`; what is in it is of no use here.
    Text,
    /// Anything of one character.
    Mark(char),
    /// Nothing is left.
    End,
}

/// A reader of tokens that can look one ahead.
#[derive(Debug, Clone)]
pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    next_line: u32,
    ahead: Option<(Token<'a>, u32)>,
    /// The line of the last token that was taken.
    line: u32,
}

const fn in_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%')
}

impl<'a> Lexer<'a> {
    pub(crate) const fn new(text: &'a str) -> Self {
        Self {
            text,
            at: 0,
            next_line: 1,
            ahead: None,
            line: 1,
        }
    }

    /// The line of the last token that was taken.
    pub(crate) const fn line(&self) -> u32 {
        self.line
    }

    /// Refuses what was just read.
    pub(crate) fn refuse<T>(&self, what: impl Into<String>, advice: impl Into<String>) -> Result<T, Refused> {
        Err(Refused::new(self.line, what, advice))
    }

    /// Refuses because something else had to come.
    pub(crate) fn unexpected<T>(&self, found: Token<'a>, wanted: &str) -> Result<T, Refused> {
        let advice = format!("here {wanted} has to be; compile the source again with nvcc 12 or 13");
        self.refuse(format!("unexpected {}", shown(found)), advice)
    }

    pub(crate) fn peek(&mut self) -> Result<Token<'a>, Refused> {
        if let Some((token, _)) = self.ahead {
            return Ok(token);
        }
        let token = self.read()?;
        self.ahead = Some((token, self.next_line));
        Ok(token)
    }

    pub(crate) fn next(&mut self) -> Result<Token<'a>, Refused> {
        self.peek()?;
        let (token, line) = self.ahead.take().unwrap_or((Token::End, self.next_line));
        self.line = line;
        Ok(token)
    }

    /// Takes `mark` if it comes next.
    pub(crate) fn accept(&mut self, mark: char) -> Result<bool, Refused> {
        let there = self.peek()? == Token::Mark(mark);
        if there {
            self.next()?;
        }
        Ok(there)
    }

    pub(crate) fn expect(&mut self, mark: char) -> Result<(), Refused> {
        match self.next()? {
            Token::Mark(found) if found == mark => Ok(()),
            other => self.unexpected(other, &format!("'{mark}'")),
        }
    }

    pub(crate) fn name(&mut self) -> Result<&'a str, Refused> {
        match self.next()? {
            Token::Name(name) => Ok(name),
            other => self.unexpected(other, "a name"),
        }
    }

    /// A number that stands for a size or a count.
    pub(crate) fn count(&mut self) -> Result<u64, Refused> {
        match self.next()? {
            Token::Integer(number) => Ok(number),
            other => self.unexpected(other, "a number"),
        }
    }

    /// Skips to the line's end: what `.loc` and `.file` are.
    pub(crate) fn skip_line(&mut self) {
        self.ahead = None;
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    }

    fn skip_blank(&mut self) -> Result<(), Refused> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at..) {
                Some([b'\n', ..]) => {
                    self.next_line += 1;
                    self.at += 1;
                }
                Some([b' ' | b'\t' | b'\r', ..]) => self.at += 1,
                Some([b'/', b'/', ..]) => {
                    let rest = &bytes[self.at..];
                    self.at += rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
                }
                Some([b'/', b'*', ..]) => self.skip_comment()?,
                _ => return Ok(()),
            }
        }
    }

    fn skip_comment(&mut self) -> Result<(), Refused> {
        let Some(end) = self.text[self.at..].find("*/") else {
            self.line = self.next_line;
            return self.refuse("a comment without an end", "end it with */");
        };
        let lines = self.text.as_bytes()[self.at..self.at + end]
            .iter()
            .filter(|&&byte| byte == b'\n');
        self.next_line += u32::try_from(lines.count()).unwrap_or(u32::MAX);
        self.at += end + 2;
        Ok(())
    }

    fn read(&mut self) -> Result<Token<'a>, Refused> {
        self.skip_blank()?;
        let bytes = self.text.as_bytes();
        let Some(&first) = bytes.get(self.at) else {
            return Ok(Token::End);
        };
        let start = self.at;
        match first {
            b'"' => {
                let rest = &bytes[start + 1..];
                let Some(end) = rest.iter().position(|&byte| byte == b'"' || byte == b'\n') else {
                    self.line = self.next_line;
                    return self.refuse("a text without an end", "end it with a quotation mark");
                };
                self.at = start + 2 + end;
                Ok(Token::Text)
            }
            b'.' if bytes.get(start + 1).is_some_and(|&byte| in_name(byte)) => {
                self.at = start + 1;
                while self.at < bytes.len() {
                    if in_name(bytes[self.at]) {
                        self.at += 1;
                    } else if bytes[self.at..].starts_with(b"::") {
                        self.at += 2;
                    } else {
                        break;
                    }
                }
                Ok(Token::Dot(&self.text[start + 1..self.at]))
            }
            b'0'..=b'9' => self.number(),
            _ if in_name(first) => {
                while self.at < bytes.len() && in_name(bytes[self.at]) {
                    self.at += 1;
                }
                Ok(Token::Name(&self.text[start..self.at]))
            }
            _ => {
                let mark = self.text[start..].chars().next().unwrap_or('\u{fffd}');
                self.at += mark.len_utf8();
                Ok(Token::Mark(mark))
            }
        }
    }

    fn number(&mut self) -> Result<Token<'a>, Refused> {
        let bytes = self.text.as_bytes();
        let start = self.at;
        while self.at < bytes.len() {
            let byte = bytes[self.at];
            let fraction = byte == b'.' && bytes.get(self.at + 1).is_some_and(u8::is_ascii_digit);
            let exponent = matches!(byte, b'+' | b'-')
                && matches!(bytes[self.at - 1], b'e' | b'E')
                && !bytes[start..].starts_with(b"0x");
            if !(in_name(byte) || fraction || exponent) {
                break;
            }
            self.at += 1;
        }
        let text = &self.text[start..self.at];
        if let Some(token) = parse_number(text) {
            return Ok(token);
        }
        self.line = self.next_line;
        self.refuse(format!("'{}' is no number", cut(text)), "write it as PTX has numbers")
    }
}

fn parse_number(text: &str) -> Option<Token<'static>> {
    let (head, rest) = text.split_at(text.len().min(2));
    match head {
        "0f" | "0F" if rest.len() == 8 => return u32::from_str_radix(rest, 16).ok().map(Token::Single),
        "0d" | "0D" if rest.len() == 16 => return u64::from_str_radix(rest, 16).ok().map(Token::Double),
        "0x" | "0X" => {
            let digits = rest.strip_suffix('U').unwrap_or(rest);
            return u64::from_str_radix(digits, 16).ok().map(Token::Integer);
        }
        "0b" | "0B" => {
            let digits = rest.strip_suffix('U').unwrap_or(rest);
            return u64::from_str_radix(digits, 2).ok().map(Token::Integer);
        }
        _ => {}
    }
    if text.contains(['.', 'e', 'E']) {
        return text.parse::<f64>().ok().map(|number| Token::Double(number.to_bits()));
    }
    let digits = text.strip_suffix('U').unwrap_or(text);
    let octal = digits.len() > 1 && digits.starts_with('0');
    u64::from_str_radix(digits, if octal { 8 } else { 10 })
        .ok()
        .map(Token::Integer)
}

/// At most so much of somebody's text is in a message.
pub(crate) fn cut(text: &str) -> &str {
    let mut end = text.len().min(60);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn shown(token: Token<'_>) -> String {
    match token {
        Token::Name(name) => format!("'{}'", cut(name)),
        Token::Dot(name) => format!("'.{}'", cut(name)),
        Token::Integer(number) => format!("number {number}"),
        Token::Single(_) | Token::Double(_) => "floating-point number".to_owned(),
        Token::Text => "text".to_owned(),
        Token::Mark(mark) => format!("{mark:?}"),
        Token::End => "end of the text".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<Token<'_>> {
        let mut lexer = Lexer::new(text);
        let mut tokens = Vec::new();
        loop {
            match lexer.next().unwrap() {
                Token::End => return tokens,
                token => tokens.push(token),
            }
        }
    }

    #[test]
    fn numbers_are_what_ptx_says() {
        let text = "0f3F800000 0d3FF0000000000000 0x1F 017 0b101 12U 1.5 2e-1";
        let wanted = [
            Token::Single(1.0f32.to_bits()),
            Token::Double(1.0f64.to_bits()),
            Token::Integer(31),
            Token::Integer(15),
            Token::Integer(5),
            Token::Integer(12),
            Token::Double(1.5f64.to_bits()),
            Token::Double(0.2f64.to_bits()),
        ];
        assert_eq!(all(text), wanted);
    }

    #[test]
    fn comments_and_lines_are_counted() {
        let mut lexer = Lexer::new("// a\n/* b\n c */ ld.shared::cta.u32 %r1;");
        assert_eq!(lexer.next().unwrap(), Token::Name("ld"));
        assert_eq!(lexer.line(), 3);
        assert_eq!(lexer.next().unwrap(), Token::Dot("shared::cta"));
        assert!(Lexer::new("/* never").next().is_err());
        assert!(Lexer::new("0xzz").next().is_err());
    }
}
