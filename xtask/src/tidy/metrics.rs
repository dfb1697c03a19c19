//! The rules that every metric counts something, what is registered under a name is incremented somewhere in its crate, and
//! that docs/vmm.md lists it.
//!
//! Follows names, not types: `field: registry.counter("x", ..)` or `let field = ..` wants `field.increment()` or
//! `field.add(n)` in the same crate, outside of tests, under that name or one that it was passed on to. A closure that
//! registers (`let counter = |name| registry.counter(name, ..)`) is followed to its calls. Knows no metric.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::{Finding, Source};

/// The document with all metrics; what the daemon passes on is compared with it by a test of the node's.
const DOCUMENT: &str = "docs/vmm.md";

/// What one crate registers and counts.
#[derive(Default)]
struct Uses {
    registered: Vec<Registered>,
    counted: BTreeSet<String>,
    /// Where a name's value goes: `Self { field: local }`, `let item = self.items.get(i)`.
    passed: BTreeMap<String, BTreeSet<String>>,
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
            makers: BTreeMap::new(),
        }
        .visit_file(&file);
    }
    let document = sources.iter().find(|source| source.path == DOCUMENT);
    for uses in crates.values() {
        for registered in &uses.registered {
            let listed = document.is_none_or(|source| source.text.contains(&format!("`{}`", registered.metric)));
            if !listed {
                let message = format!(
                    "{DOCUMENT} does not list the metric {}; say there what it counts",
                    registered.metric
                );
                findings.push(Finding::new(&registered.file, registered.line, message));
            }
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
        let mut seen = BTreeSet::new();
        let mut open = vec![holder];
        while let Some(name) = open.pop() {
            if self.counted.contains(name) {
                return true;
            }
            if seen.insert(name) {
                open.extend(self.passed.get(name).into_iter().flatten().map(String::as_str));
            }
        }
        false
    }
}

struct Reader<'a> {
    uses: &'a mut Uses,
    file: &'a str,
    /// The field or local that gets the value of the expression being read.
    holder: Option<String>,
    /// Closures that register, with the metric's name where it is fixed.
    makers: BTreeMap<String, Option<String>>,
}

impl Reader<'_> {
    fn register(&mut self, metric: String, line: usize) {
        let registered = Registered {
            metric,
            holder: self.holder.clone(),
            file: self.file.to_owned(),
            line,
        };
        self.uses.registered.push(registered);
    }

    /// All names in `from` go to `to`.
    fn pass(&mut self, from: &syn::Expr, to: &str) {
        let mut names = Names::default();
        names.visit_expr(from);
        for name in names.found {
            self.uses.passed.entry(name).or_default().insert(to.to_owned());
        }
    }

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
        self.pass(&field.expr, &name.to_string());
        self.within(Some(name.to_string()), |reader| visit::visit_field_value(reader, field));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        let Some(init) = &local.init else { return };
        let name = pattern_name(&local.pat);
        if let (Some(name), syn::Expr::Closure(closure)) = (&name, &*init.expr) {
            let mut maker = Maker::default();
            maker.visit_expr(&closure.body);
            if maker.found {
                self.makers.insert(name.clone(), maker.metric);
                return;
            }
        }
        if let Some(name) = &name {
            self.pass(&init.expr, name);
        }
        self.within(name, |reader| visit::visit_local(reader, local));
    }

    fn visit_expr_let(&mut self, expr: &'ast syn::ExprLet) {
        if let Some(name) = pattern_name(&expr.pat) {
            self.pass(&expr.expr, &name);
        }
        visit::visit_expr_let(self, expr);
    }

    fn visit_expr_for_loop(&mut self, expr: &'ast syn::ExprForLoop) {
        if let Some(name) = pattern_name(&expr.pat) {
            self.pass(&expr.expr, &name);
        }
        visit::visit_expr_for_loop(self, expr);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(path) = &*call.func
            && let Some(name) = path.path.get_ident()
            && let Some(fixed) = self.makers.get(&name.to_string())
        {
            let metric = fixed
                .clone()
                .or_else(|| call.args.first().and_then(literal))
                .unwrap_or_default();
            self.register(metric, name.span().start().line);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "counter"
            && let Some(metric) = call.args.first().and_then(literal)
        {
            self.register(metric, call.method.span().start().line);
        }
        if call.method == "increment" || call.method == "add" {
            self.uses.counted.extend(last_name(&call.receiver));
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// Whether an expression registers a metric, and under which fixed name.
#[derive(Default)]
struct Maker {
    found: bool,
    metric: Option<String>,
}

impl<'ast> Visit<'ast> for Maker {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "counter" {
            self.found = true;
            self.metric = call.args.first().and_then(literal);
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// Locals and fields that an expression mentions.
#[derive(Default)]
struct Names {
    found: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_expr(&mut self, expr: &'ast syn::Expr) {
        self.found.extend(last_name(expr).filter(|name| name != "self"));
        visit::visit_expr(self, expr);
    }
}

fn literal(expr: &syn::Expr) -> Option<String> {
    match expr {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(text),
            ..
        }) => Some(text.value()),
        _ => None,
    }
}

/// `x` of `x` and of `Some(x)`.
fn pattern_name(pattern: &syn::Pat) -> Option<String> {
    match pattern {
        syn::Pat::Ident(pattern) => Some(pattern.ident.to_string()),
        syn::Pat::TupleStruct(pattern) => pattern.elems.first().and_then(pattern_name),
        syn::Pat::Reference(pattern) => pattern_name(&pattern.pat),
        _ => None,
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
    fn closures_and_loops_are_followed() {
        let code = "fn new(r: &R) -> S { let make = |name| r.counter(name, &[]); let fixed = |l| r.counter(\"f\", &[l]);\n\
                    S { a: make(\"a\"), b: make(\"b\"), c: fixed(1), all: many() } }\n\
                    impl S { fn go(&self) { self.a.increment(); for one in &self.all { one.add(1); } } }";
        let found = found(code);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("metric b") && found[1].contains("metric f"),
            "{found:?}"
        );
        let code = "fn new(r: &R) -> S { let all = n.map(|n| r.counter(\"m\", &[n])); S { kept: all.collect() } }\n\
                    impl S { fn go(&self) { if let Some(one) = self.kept.get(1) { one.increment(); } } }";
        assert!(super::tests::found(code).is_empty());
    }

    #[test]
    fn a_metric_that_the_document_does_not_list_is_found() {
        let code = "fn new(r: &R) -> S { S { reads: r.counter(\"reads_total\", &[]) } }\n\
                    impl S { fn go(&self) { self.reads.increment(); } }";
        let with = |document: &str| {
            let mut findings = Vec::new();
            let sources = [source("devices/x/src/lib.rs", code), source(DOCUMENT, document)];
            check(&sources, &mut findings);
            findings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(with("| `reads_total` | | reads |").is_empty());
        let found = with("| `bytes_total` | | bytes |");
        assert!(
            matches!(&found[..], [one] if one.contains("does not list the metric reads_total")),
            "{found:?}"
        );
    }

    #[test]
    fn tests_neither_register_nor_count() {
        let counted_in_test = "fn new(r: &R) -> S { S { a: r.counter(\"a\", &[]) } }\n\
                               #[cfg(test)] mod tests { fn t() { s.a.increment(); let b = r.counter(\"b\", &[]); } }";
        let found = found(counted_in_test);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
