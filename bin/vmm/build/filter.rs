//! From a filter's rules to BPF: the call's number is searched for as in a sorted table, then its arguments are compared.
//!
//! The kernel tries each of some 450 numbers when a filter is installed (`seccomp_cache_prepare`), and runs the rest for
//! each call, so a search of six steps counts where a list of sixty rules would do as well. Knows seccompiler's JSON form
//! of a rule and classic BPF (Linux `filter.rst`), no call by its name.

use std::collections::BTreeMap;

use seccompiler::{BpfMap, TargetArch, compile_from_json, sock_filter};
use serde_json::{Value, json};

// linux/bpf_common.h: class, size or operation, and source of each instruction.
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const EQUAL: u16 = 0x15;
const GREATER: u16 = 0x25;
const NOT_LESS: u16 = 0x35;
const RETURN: u16 = 0x06;

// linux/seccomp.h and linux/audit.h.
const KILL: u32 = 0x8000_0000;
const ALLOW: u32 = 0x7fff_0000;
const ARCH: u32 = 0xc000_003e;

/// Offsets in `struct seccomp_data`: number, architecture, the lower half of an argument.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
fn argument_at(index: u32) -> u32 {
    16 + 8 * index
}

/// No call has a higher number.
const NUMBERS: u32 = 1024;

/// What is asked of one argument.
#[derive(Clone, Copy)]
struct Test {
    argument: u32,
    mask: u32,
    operation: u16,
    value: u32,
}

/// For each call the ways in which it is allowed; a way without tests always is one.
type Calls = BTreeMap<u32, Vec<Vec<Test>>>;

/// Compiles rules, and makes sure that the result says what seccompiler's own says.
pub(crate) fn compile(rules: &[Value]) -> Vec<sock_filter> {
    let reference = seccompiler(rules);
    let mut calls = Calls::new();
    for rule in rules {
        let name = rule["syscall"].as_str().unwrap_or_else(|| panic!("{rule} has no call"));
        let tests = rule["args"]
            .as_array()
            .map_or(Vec::new(), |tests| tests.iter().map(test).collect());
        calls.entry(number(name)).or_default().push(tests);
    }
    let mut program = vec![
        statement(LOAD, ARCH_AT),
        jump(EQUAL, ARCH, 1, 0),
        statement(RETURN, KILL),
        statement(LOAD, NUMBER_AT),
    ];
    search(&calls.iter().collect::<Vec<_>>(), &mut program);
    compare(&calls, &program, &reference);
    program
}

fn seccompiler(rules: &[Value]) -> Vec<sock_filter> {
    let filter = json!({"f": {"mismatch_action": "kill_process", "match_action": "allow", "filter": rules}});
    let mut compiled: BpfMap = compile_from_json(filter.to_string().as_bytes(), TargetArch::x86_64)
        .unwrap_or_else(|error| panic!("a filter does not compile: {error}"));
    compiled.remove("f").unwrap_or_else(|| panic!("a filter is lost"))
}

/// A call's number: the one that a filter of it alone allows.
fn number(name: &str) -> u32 {
    let program = seccompiler(&[json!({"syscall": name})]);
    let found = (0..NUMBERS).find(|&number| run(&program, ARCH, number, [0; 6]) == ALLOW);
    found.unwrap_or_else(|| panic!("no number is a {name}"))
}

fn test(condition: &Value) -> Test {
    let word = |value: &Value| {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.unwrap_or_else(|| panic!("{condition} has a number of more than 32 bits"))
    };
    let masked = condition["op"].get("masked_eq").map(word);
    let operation = match (condition["op"].as_str(), masked) {
        (Some("eq"), None) | (None, Some(_)) => EQUAL,
        (Some("le"), None) => GREATER,
        _ => panic!("{condition} is not understood"),
    };
    Test {
        argument: word(&condition["index"]),
        mask: masked.unwrap_or(u32::MAX),
        operation,
        value: word(&condition["val"]),
    }
}

fn statement(code: u16, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn distance(instructions: usize) -> u32 {
    u32::try_from(instructions).unwrap_or_else(|_| panic!("a filter is too long"))
}

/// Looks for the number, which has been loaded, among these.
fn search(calls: &[(&u32, &Vec<Vec<Test>>)], program: &mut Vec<sock_filter>) {
    match calls {
        [] => program.push(statement(RETURN, KILL)),
        [(number, ways)] => {
            program.extend([jump(EQUAL, **number, 1, 0), statement(RETURN, KILL)]);
            judge(ways, program);
        }
        _ => {
            let (lower, upper) = calls.split_at(calls.len() / 2);
            let mut below = Vec::new();
            search(lower, &mut below);
            // A conditional jump reaches 255 instructions, the other kind any.
            program.push(jump(NOT_LESS, *upper[0].0, 0, 1));
            program.push(statement(JUMP, distance(below.len())));
            program.extend(below);
            search(upper, program);
        }
    }
}

/// Looks whether one of the ways is this one.
fn judge(ways: &[Vec<Test>], program: &mut Vec<sock_filter>) {
    for tests in ways {
        if tests.is_empty() {
            return program.push(statement(RETURN, ALLOW));
        }
        let mut left: usize = tests.iter().map(length).sum();
        for test in tests {
            program.push(statement(LOAD, argument_at(test.argument)));
            if test.mask != u32::MAX {
                program.push(statement(AND, test.mask));
            }
            left -= length(test);
            // Over the rest of this way, and the return behind it.
            let other = u8::try_from(left + 1).unwrap_or_else(|_| panic!("a rule is too long"));
            program.push(match test.operation {
                EQUAL => jump(EQUAL, test.value, 0, other),
                operation => jump(operation, test.value, other, 0),
            });
        }
        program.push(statement(RETURN, ALLOW));
    }
    program.push(statement(RETURN, KILL));
}

fn length(test: &Test) -> usize {
    if test.mask == u32::MAX { 2 } else { 3 }
}

/// What the kernel would do with this call.
fn run(program: &[sock_filter], arch: u32, number: u32, arguments: [u32; 6]) -> u32 {
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let instruction = program
            .get(at)
            .unwrap_or_else(|| panic!("a filter ends without a word"));
        let (k, mut skip) = (instruction.k, 0);
        let mut branch = |holds: bool| skip = usize::from(if holds { instruction.jt } else { instruction.jf });
        match instruction.code {
            LOAD if k == NUMBER_AT => accumulator = number,
            LOAD if k == ARCH_AT => accumulator = arch,
            // Lower halves; the upper ones are zero here.
            LOAD if k >= 16 && k % 8 == 0 => accumulator = arguments[(k as usize - 16) / 8],
            LOAD if k >= 16 && k % 8 == 4 => accumulator = 0,
            AND => accumulator &= k,
            JUMP => skip = k as usize,
            EQUAL => branch(accumulator == k),
            GREATER => branch(accumulator > k),
            NOT_LESS => branch(accumulator >= k),
            RETURN => return k,
            other => panic!("instruction {other:#x} is not known"),
        }
        at += 1 + skip;
    }
}

/// Tries every number, and each call that has tests with arguments at and around every value that is tested.
fn compare(calls: &Calls, program: &[sock_filter], reference: &[sock_filter]) {
    let same = |arch: u32, number: u32, arguments: [u32; 6]| {
        let (ours, theirs) = (
            run(program, arch, number, arguments),
            run(reference, arch, number, arguments),
        );
        assert_eq!(ours, theirs, "call {number} with {arguments:x?}");
    };
    // AUDIT_ARCH_I386, and the bit of x32's numbers.
    same(0x4000_0003, 0, [0; 6]);
    for number in (0..NUMBERS).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
        same(ARCH, number, [0; 6]);
    }
    for (&number, ways) in calls {
        let good = |tests: &Vec<Test>| {
            let mut arguments = [0; 6];
            for test in tests {
                arguments[test.argument as usize] = test.value;
            }
            arguments
        };
        let tests: Vec<&Test> = ways.iter().flatten().collect();
        for base in ways.iter().map(good).chain([[0; 6], [u32::MAX; 6]]) {
            for test in &tests {
                let around = [
                    test.value,
                    test.value.wrapping_add(1),
                    test.value.wrapping_sub(1),
                    test.mask,
                    !test.mask,
                ];
                for value in around.into_iter().chain((0..32).map(|bit| test.value ^ (1 << bit))) {
                    let mut arguments = base;
                    arguments[test.argument as usize] = value;
                    same(ARCH, number, arguments);
                }
            }
        }
    }
}
