//! `cargo xtask strings`: every text of the product that a person can be shown, with its place: help, errors, log lines.
//!
//! Reads sources only. What is text is guessed generously: each string literal of at least three words outside of tests, and the
//! documentation of command line arguments, which is their help. Whether the words are good is for the reader, and for tidy's rule on words.

use std::path::Path;

use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use serde::Serialize;
use syn::visit::Visit;

use crate::tree;

/// Folders whose programs people use; tests and benchmarks in them are left out.
const PRODUCT: &[&str] = &["bin/", "crates/", "devices/", "guest/agent/", "lab/ctl/"];

/// A text with fewer words is a name, a path or a format.
const WORDS: usize = 3;

/// What the text is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Documentation of a command line argument or verb.
    Help,
    /// Everything else: errors, log lines, progress.
    Text,
}

/// One text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Shown {
    /// Path from the root.
    pub(crate) file: String,
    /// Line, counted from one.
    pub(crate) line: usize,
    /// What for.
    pub(crate) kind: Kind,
    /// The words.
    pub(crate) text: String,
}

/// Prints all texts, as lines or as JSON.
///
/// # Errors
/// The tree cannot be read.
#[expect(clippy::print_stdout, reason = "the texts are this command's output")]
pub(crate) fn command(root: &Path, json: bool) -> Result<u8> {
    let mut all = Vec::new();
    for path in tree::files(root, None)? {
        if is_product(&path)
            && let Ok(text) = std::fs::read_to_string(root.join(&path))
        {
            all.extend(of_source(&path, &text));
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(0);
    }
    for Shown { file, line, kind, text } in &all {
        let kind = match kind {
            Kind::Help => "help",
            Kind::Text => "text",
        };
        println!("{file}:{line}: {kind}: {text}");
    }
    Ok(0)
}

/// Whether a file's texts reach people who use Basalt.
pub(crate) fn is_product(path: &str) -> bool {
    let for_tests = path.contains("/tests/") || path.ends_with("/tests.rs") || path.contains("/conformance/");
    path.ends_with(".rs") && !for_tests && PRODUCT.iter().any(|folder| path.starts_with(folder))
}

/// The texts of one source file; none if it does not parse, which the compiler says better.
pub(crate) fn of_source(path: &str, source: &str) -> Vec<Shown> {
    let Ok(file) = syn::parse_file(source) else {
        return Vec::new();
    };
    let mut texts = Texts {
        file: path,
        found: Vec::new(),
    };
    texts.visit_file(&file);
    texts.found.sort_by_key(|shown| shown.line);
    texts.found.dedup();
    texts.found
}

struct Texts<'a> {
    file: &'a str,
    found: Vec<Shown>,
}

impl Texts<'_> {
    fn add(&mut self, line: usize, kind: Kind, text: &str) {
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let wanted = match kind {
            Kind::Help => !text.is_empty(),
            Kind::Text => text.split(' ').count() >= WORDS,
        };
        if wanted {
            let file = self.file.to_owned();
            self.found.push(Shown { file, line, kind, text });
        }
    }

    fn tokens(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Literal(literal) => {
                    let line = literal.span().start().line;
                    if let syn::Lit::Str(text) = syn::Lit::new(literal) {
                        self.add(line, Kind::Text, &text.value());
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }

    /// The documentation of an item that clap makes help of, and of all that is in it.
    fn help(&mut self, attributes: &[syn::Attribute]) {
        for attribute in attributes {
            if let syn::Meta::NameValue(value) = &attribute.meta
                && value.path.is_ident("doc")
                && let syn::Expr::Lit(syn::ExprLit {
                    lit: syn::Lit::Str(text),
                    ..
                }) = &value.value
            {
                self.add(text.span().start().line, Kind::Help, &text.value());
            }
        }
    }
}

impl<'ast> Visit<'ast> for Texts<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.add(text.span().start().line, Kind::Text, &text.value());
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        // Reasons of lints are for those who read the code, and so is documentation.
        let for_readers = ["allow", "expect", "doc"]
            .iter()
            .any(|name| attribute.path().is_ident(name));
        if let syn::Meta::List(list) = &attribute.meta
            && !for_readers
        {
            self.tokens(list.tokens.clone());
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if is_clap(&item.attrs) {
            self.help(&item.attrs);
            item.fields.iter().for_each(|field| self.help(&field.attrs));
        }
        syn::visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if is_clap(&item.attrs) {
            for variant in &item.variants {
                self.help(&variant.attrs);
                variant.fields.iter().for_each(|field| self.help(&field.attrs));
            }
        }
        syn::visit::visit_item_enum(self, item);
    }
}

/// `#[derive(...)]` of something that clap makes help of.
fn is_clap(attributes: &[syn::Attribute]) -> bool {
    let derives = |attribute: &&syn::Attribute| attribute.path().is_ident("derive");
    let named = |attribute: &syn::Attribute| match &attribute.meta {
        syn::Meta::List(list) => {
            let words = list.tokens.to_string();
            ["Parser", "Args", "Subcommand", "ValueEnum"]
                .iter()
                .any(|name| words.split(|c: char| !c.is_alphanumeric()).any(|word| word == *name))
        }
        _ => false,
    };
    attributes.iter().filter(derives).any(named)
}

/// `#[cfg(test)]`.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "test")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_read_is_found_with_its_place() {
        let source = r#"//! What a file is.
/// For readers of the code alone.
#[derive(thiserror::Error)]
enum Error {
    #[error("it cannot be opened: {0}")]
    Open(String),
}
#[derive(Debug, clap::Args)]
struct Args {
    /// Only this one
    only: bool,
}
fn f() {
    log::warn!("the first thing {} went wrong", g("a b c", "short"));
}
#[cfg(test)]
mod tests {
    fn t() { g("text of a test is none"); }
}
"#;
        let found = of_source("bin/x/src/main.rs", source);
        let found: Vec<_> = found
            .iter()
            .map(|shown| (shown.line, shown.kind, shown.text.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                (5, Kind::Text, "it cannot be opened: {0}"),
                (10, Kind::Help, "Only this one"),
                (14, Kind::Text, "the first thing {} went wrong"),
                (14, Kind::Text, "a b c"),
            ]
        );
    }

    #[test]
    fn only_the_products_sources_count() {
        assert!(is_product("bin/basalt/src/main.rs"));
        for other in [
            "bin/basalt/tests/x.rs",
            "xtask/src/main.rs",
            "crates/a/src/tests.rs",
            "crates/a/x.md",
        ] {
            assert!(!is_product(other), "{other}");
        }
    }
}
