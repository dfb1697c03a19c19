//! The rule that every metric counts something: what is registered under a name is incremented somewhere in its crate.
//!
//! Follows names, not types: `field: registry.counter("x", ..)` or `let field = ..` wants `field.increment()` or
//! `field.add(n)` in the same crate, outside of tests. Knows no metric.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::{Finding, Source};

/// What one crate registers and counts.
#[derive(Default)]
struct Uses {
    registered: Vec<Registered>,
    counted: BTreeSet<String>,
    /// A local that becomes a field: `Self { field: local }`.
    renamed: BTreeMap<String, BTreeSet<String>>,
}

struct Registered {
    metric: String,
    holder: Option<String>,
    file: String,
    line: usize,
}

/// Checks all crates.
pub(super) fn check(sources: &[Source], findings: &mut Vec<Finding>) {
    let mut crates: BTreeMap<&str, Uses> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let Some((folder, _)) = source.path.split_once("/src/") else {
            continue;
        };
        let Ok(file) = syn::parse_file(&source.text) else {
            continue;
        };
        let uses = crates.entry(folder).or_default();
        Reader {
            uses,
            file: &source.path,
            holder: None,
        }
        .visit_file(&file);
    }
    for uses in crates.values() {
        for registered in &uses.registered {
            let counted = registered.holder.as_ref().is_some_and(|holder| uses.counts(holder));
            if !counted {
                let metric = &registered.metric;
                let message =
                    format!("no code increments the metric {metric}; count it where it happens, or remove it");
                findings.push(Finding::new(&registered.file, registered.line, message));
            }
        }
    }
}

impl Uses {
    fn counts(&self, holder: &str) -> bool {
        self.counted.contains(holder)
            || self
                .renamed
                .get(holder)
                .is_some_and(|names| names.iter().any(|name| self.counted.contains(name)))
    }
}

struct Reader<'a> {
    uses: &'a mut Uses,
    file: &'a str,
    /// The field or local that gets the value of the expression being read.
    holder: Option<String>,
}

impl Reader<'_> {
    fn within(&mut self, holder: Option<String>, read: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.holder, holder);
        read(self);
        self.holder = outer;
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        let syn::Member::Named(name) = &field.member else {
            return;
        };
        if let syn::Expr::Path(path) = &field.expr
            && let Some(local) = path.path.get_ident()
        {
            self.uses
                .renamed
                .entry(local.to_string())
                .or_default()
                .insert(name.to_string());
        }
        self.within(Some(name.to_string()), |reader| visit::visit_field_value(reader, field));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        let name = match &local.pat {
            syn::Pat::Ident(pattern) => Some(pattern.ident.to_string()),
            _ => None,
        };
        self.within(name, |reader| visit::visit_local(reader, local));
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "counter"
            && let Some(syn::Expr::Lit(syn::ExprLit {
                lit: syn::Lit::Str(metric),
                ..
            })) = call.args.first()
        {
            let line = call.method.span().start().line;
            let file = self.file.to_owned();
            self.uses.registered.push(Registered {
                metric: metric.value(),
                holder: self.holder.clone(),
                file,
                line,
            });
        }
        if call.method == "increment" || call.method == "add" {
            self.uses.counted.extend(last_name(&call.receiver));
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// `c` of `a.b.c`, of `c` and of `a.c[i]`.
fn last_name(expr: &syn::Expr) -> Option<String> {
    match expr {
        syn::Expr::Field(field) => match &field.member {
            syn::Member::Named(name) => Some(name.to_string()),
            syn::Member::Unnamed(_) => None,
        },
        syn::Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        syn::Expr::Index(index) => last_name(&index.expr),
        syn::Expr::Reference(reference) => last_name(&reference.expr),
        _ => None,
    }
}

fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attr| {
        attr.path().is_ident("cfg") && attr.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    fn found(code: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(&[source("crates/a/src/lib.rs", code)], &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_metric_that_nothing_increments_is_found() {
        let code = "fn new(r: &R) -> S { S { reads: r.counter(\"reads_total\", &[]), w: r.counter(\"w_total\", &[]) } }\n\
                    impl S { fn go(&self) { self.reads.increment(); } }";
        let found = found(code);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("w_total"), "{found:?}");
    }

    #[test]
    fn locals_fields_and_arrays_are_followed() {
        let code = "fn new(r: &R) -> S { let x = r.counter(\"x\", &[]); let many = k.map(|k| r.counter(\"m\", &[k])); \
                    S { held: x, many } }\n\
                    impl S { fn go(&self) { self.held.add(2); self.many[3].increment(); } }";
        assert!(found(code).is_empty());
    }

    #[test]
    fn tests_neither_register_nor_count() {
        let counted_in_test = "fn new(r: &R) -> S { S { a: r.counter(\"a\", &[]) } }\n\
                               #[cfg(test)] mod tests { fn t() { s.a.increment(); let b = r.counter(\"b\", &[]); } }";
        let found = found(counted_in_test);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
