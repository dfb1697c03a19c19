//! Declarations of C as the annotations write them: `cudaError_t (void **devPtr, size_t size)`.
//!
//! Knows no function and no type by name.

/// A type of C.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CType {
    /// The name beneath all stars, such as `unsigned int`.
    pub name: String,
    /// How many stars and brackets.
    pub pointers: usize,
    /// Whether what is pointed to cannot be written.
    pub constant: bool,
}

/// What a function takes and returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    /// What it returns.
    pub returns: CType,
    /// Names, types, and each as it is written.
    pub params: Vec<(String, CType, String)>,
}

impl Declaration {
    /// Reads one; what is wrong with it otherwise.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no declaration; write `RETURNED (TYPE NAME, ...)`, or `RETURNED (void)`");
        let (returns, rest) = text.split_once('(').ok_or_else(wrong)?;
        let inner = rest.trim().strip_suffix(')').ok_or_else(wrong)?.trim();
        let (returns, _) = split(&format!("{returns} returned")).ok_or_else(wrong)?;
        let mut params = Vec::new();
        for param in inner
            .split(',')
            .map(str::trim)
            .filter(|param| !param.is_empty() && *param != "void")
        {
            let (c_type, name) = split(param).ok_or_else(wrong)?;
            if params.iter().any(|(known, _, _)| *known == name) {
                return Err(format!(
                    "{text:?} has the parameter {name} twice; each has a name of its own"
                ));
            }
            params.push((name, c_type, param.to_owned()));
        }
        Ok(Self { returns, params })
    }
}

/// A type and the name behind it.
fn split(text: &str) -> Option<(CType, String)> {
    let (text, brackets) = match text.split_once('[') {
        Some((before, _)) => (before.trim_end(), 1),
        None => (text, 0),
    };
    let is_part = |char: char| char.is_ascii_alphanumeric() || char == '_';
    let begin = text.rfind(|char| !is_part(char))? + 1;
    let (before, name) = text.split_at(begin);
    if name.is_empty() || name.starts_with(|char: char| char.is_ascii_digit()) {
        return None;
    }
    let pointers = before.matches('*').count() + brackets;
    let words: Vec<_> = before.split(|char: char| char == '*' || char.is_whitespace()).collect();
    let constant = words.contains(&"const");
    let words: Vec<_> = words
        .into_iter()
        .filter(|word| !matches!(*word, "" | "const" | "struct" | "enum"))
        .collect();
    let known = !words.is_empty() && words.iter().all(|word| word.chars().all(is_part));
    let name_of_type = words.join(" ");
    known.then_some((
        CType {
            name: name_of_type,
            pointers,
            constant,
        },
        name.to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_is_read() {
        let read =
            Declaration::parse("cudaError_t (const struct cudaPitch *a, unsigned int b, const int c[], void **d)")
                .unwrap();
        let types: Vec<_> = read
            .params
            .iter()
            .map(|(name, of, _)| (name.as_str(), of.name.as_str(), of.pointers, of.constant))
            .collect();
        let expected = [
            ("a", "cudaPitch", 1, true),
            ("b", "unsigned int", 0, false),
            ("c", "int", 1, true),
            ("d", "void", 2, false),
        ];
        assert_eq!(types, expected);
        assert_eq!((read.returns.name.as_str(), read.returns.pointers), ("cudaError_t", 0));
        assert_eq!(Declaration::parse("const char * (int e)").unwrap().returns.pointers, 1);
        assert!(Declaration::parse("int (void)").unwrap().params.is_empty());
    }

    #[test]
    fn what_is_none_is_refused_with_its_text() {
        for text in [
            "int",
            "int (int)",
            "int (int a",
            "int (int 3)",
            "(int a)",
            "int (int a, int a)",
        ] {
            let error = Declaration::parse(text).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
