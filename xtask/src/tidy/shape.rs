//! The style budgets: how long files and functions are, how wide traits, structs and parameter lists.
//!
//! Reads syntax trees. Limits and exceptions are data (layers.toml); this file knows no item by name.

use std::cell::RefCell;

use syn::visit::{self, Visit};

use super::config::Config;
use super::{Finding, Source};

/// The budgets, and which exceptions were of use.
pub(super) struct Shapes<'a> {
    config: &'a Config,
    used: RefCell<Vec<bool>>,
}

/// Something measured.
struct Measure<'a> {
    budget: &'a str,
    path: &'a str,
    item: &'a str,
    line: usize,
    size: usize,
}

impl<'a> Shapes<'a> {
    /// Budgets as the file says.
    pub(super) fn new(config: &'a Config) -> Self {
        Self {
            config,
            used: RefCell::new(vec![false; config.exceptions.len()]),
        }
    }

    /// Measures one file and everything in it. A file that is generated may be long, as nobody edits it.
    pub(super) fn check(&self, source: &Source, findings: &mut Vec<Finding>) {
        let mut generated = self.config.generated.keys();
        if !generated.any(|folder| source.path.starts_with(folder.as_str())) {
            let size = source.text.lines().count();
            self.judge(
                &Measure {
                    budget: "file",
                    path: &source.path,
                    item: "",
                    line: 0,
                    size,
                },
                findings,
            );
        }
        match syn::parse_file(&source.text) {
            Ok(file) => Items {
                shapes: self,
                path: &source.path,
                findings,
            }
            .visit_file(&file),
            Err(error) => {
                let line = error.span().start().line;
                findings.push(Finding::new(
                    &source.path,
                    line,
                    format!("is not Rust: {error}; mend it"),
                ));
            }
        }
    }

    /// Exceptions that excuse nothing are left-overs.
    pub(super) fn finish(&self, findings: &mut Vec<Finding>) {
        for (exception, used) in self.config.exceptions.iter().zip(self.used.borrow().iter()) {
            if !used {
                let message = format!(
                    "the {} exception for {} {} is not needed any more; remove it",
                    exception.budget, exception.path, exception.item
                );
                findings.push(Finding::new("layers.toml", 0, message));
            }
        }
    }

    fn judge(&self, measure: &Measure<'_>, findings: &mut Vec<Finding>) {
        let Measure {
            budget,
            path,
            item,
            line,
            size,
        } = *measure;
        let Some(limits) = self.config.budgets.get(budget) else {
            return;
        };
        if size <= limits.limit {
            return;
        }
        let excused = self
            .config
            .exceptions
            .iter()
            .position(|exception| exception.budget == budget && exception.path == path && exception.item == item);
        let unit = match budget {
            "file" | "function" => "lines",
            "trait" => "methods",
            "struct" => "fields",
            _ => "parameters",
        };
        let what = if item.is_empty() {
            String::new()
        } else {
            format!("{item} ")
        };
        if let Some(index) = excused {
            self.used.borrow_mut()[index] = true;
            if size > limits.hard {
                let message = format!(
                    "{what}has {size} {unit}, more than any exception allows ({}); split it",
                    limits.hard
                );
                findings.push(Finding::new(path, line, message));
            }
        } else {
            let message = format!(
                "{what}has {size} {unit}, the budget is {}; split it, or list the reason in layers.toml",
                limits.limit
            );
            findings.push(Finding::new(path, line, message));
        }
    }
}

struct Items<'a, 'b> {
    shapes: &'a Shapes<'a>,
    path: &'a str,
    findings: &'b mut Vec<Finding>,
}

impl Items<'_, '_> {
    fn measure(&mut self, budget: &str, name: &syn::Ident, size: usize) {
        let item = name.to_string();
        let line = name.span().start().line;
        self.shapes.judge(
            &Measure {
                budget,
                path: self.path,
                item: &item,
                line,
                size,
            },
            self.findings,
        );
    }

    fn function(&mut self, signature: &syn::Signature, block: Option<&syn::Block>) {
        // Parameters of a function of C are those of whoever calls it.
        if signature.abi.is_none() {
            self.measure("parameters", &signature.ident, signature.inputs.len());
        }
        if let Some(block) = block {
            let lines = block.brace_token.span.close().end().line + 1 - signature.fn_token.span.start().line;
            self.measure("function", &signature.ident, lines);
        }
    }
}

impl<'ast> Visit<'ast> for Items<'_, '_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, Some(&item.block));
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, Some(&item.block));
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.function(&item.sig, item.default.as_ref());
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let methods = item
            .items
            .iter()
            .filter(|item| matches!(item, syn::TraitItem::Fn(_)))
            .count();
        self.measure("trait", &item.ident, methods);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        // A layout in memory has as many fields as its specification says.
        if !is_repr_c(&item.attrs) {
            self.measure("struct", &item.ident, item.fields.len());
        }
        visit::visit_item_struct(self, item);
    }
}

fn is_repr_c(attrs: &[syn::Attribute]) -> bool {
    let mut found = false;
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("repr")) {
        // Arguments such as `align(8)` do not parse as bare paths; they do not matter here.
        let _ = attr.parse_nested_meta(|meta| {
            found |= meta.path.is_ident("C");
            Ok(())
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::SMALL;
    use super::super::tests::source;
    use super::*;

    fn found_with(config: &str, text: &str) -> Vec<String> {
        let config = Config::parse(config).unwrap();
        let shapes = Shapes::new(&config);
        let mut findings = Vec::new();
        shapes.check(&source("a.rs", text), &mut findings);
        shapes.finish(&mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    fn found(text: &str) -> Vec<String> {
        found_with(SMALL, text)
    }

    #[test]
    fn each_budget_is_kept() {
        assert!(
            found("fn f(a: u8, b: u8) {\n\n}\ntrait T { fn a(); fn b(); const C: u8; }\nstruct S(u8, u8);\n")
                .is_empty()
        );
        assert!(found("\n\n\n\n\n\n")[0].contains("6 lines, the budget is 5"));
        assert!(found("fn long() {\n\n\n}\n")[0].contains("a.rs:1: long has 4 lines"));
        assert!(found("impl S {\nfn long() {\n\n\n}}\n")[0].starts_with("a.rs:2: long"));
        assert!(found("trait T { fn a(); fn b(); fn c(); }\n")[0].contains("T has 3 methods"));
        assert!(found("struct S { a: u8, b: u8, c: u8 }\n")[0].contains("S has 3 fields"));
        assert!(found("fn f(a: u8, b: u8, c: u8) {}\n")[0].contains("f has 3 parameters"));
    }

    #[test]
    fn a_layout_of_a_specification_is_no_design() {
        assert!(found("extern \"C\" fn f(a: u8, b: u8, c: u8) {}\n").is_empty());
        assert!(found("#[repr(C, packed)]\nstruct S { a: u8, b: u8, c: u8 }\n").is_empty());
    }

    #[test]
    fn an_exception_excuses_up_to_the_hard_limit_and_must_be_needed() {
        let exception = |item| {
            format!("{SMALL}\n[[exception]]\nbudget = \"struct\"\npath = \"a.rs\"\nitem = \"{item}\"\nreason = \"r\"\n")
        };
        let three = "struct S(u8, u8, u8);\n";
        assert!(found_with(&exception("S"), three).is_empty());
        assert!(found_with(&exception("S"), "struct S(u8, u8, u8, u8);\n")[0].contains("any exception"));
        assert_eq!(found_with(&exception("Other"), three).len(), 2);
    }

    #[test]
    fn what_is_generated_may_be_long_but_not_wide() {
        let text = "struct S(u8, u8, u8);\n\n\n\n\n\n";
        let config = Config::parse(&format!("{SMALL}\n[generated]\n\"made/\" = \"why\"\n")).unwrap();
        let found = |path| {
            let mut findings = Vec::new();
            Shapes::new(&config).check(&source(path, text), &mut findings);
            findings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let of_generated = found("made/a.rs");
        assert!(
            of_generated.len() == 1 && of_generated[0].contains("3 fields"),
            "{of_generated:?}"
        );
        assert_eq!(found("unmade/a.rs").len(), 2);
    }

    #[test]
    fn what_is_not_rust_is_said() {
        assert!(found("fn f( {\n")[0].contains("is not Rust"));
    }
}
