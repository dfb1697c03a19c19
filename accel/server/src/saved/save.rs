//! A client's objects, as they are written: calls, binaries of programs, contents of memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::Vacant;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use accel_proto::opencl::{AnyCall, SetKernelArgSVMPointer, SetKernelExecInfo};
use accel_proto::{Call as ProtoCall, Effect, Limits, Object as Touched};

use super::calls::Logged;
use super::contents::{Contents, append};
use super::devices::Devices;
use super::state::{Call, Objects, Program, Step, Writing, due};
use super::{Refusal, query};
use crate::objects::{Form, Held, Object, Past, Sort, State};
use crate::session::Client;

/// How often it is looked whether commands have ended.
const LOOK: Duration = Duration::from_micros(200);

/// How long a driver has for callbacks of commands that are complete.
const CALLED: Duration = Duration::from_millis(500);

/// Events that are not complete have positive states; this one is of those that a client has not set.
const SUBMITTED: i32 = 2;

const NOT_KEPT: &str = "an object whose calls were not kept";

/// Such as a program that was compiled with headers, or a kernel that was copied with its arguments.
const RELEASED: &str = "an object that was made or set with another one, which was released";

const SVM: &str = "shared virtual memory, which another server could not have at its addresses";

/// Waits until all commands of a client's queues are complete.
pub(crate) fn drain(client: &Client, deadline: Instant) -> Result<(), Refusal> {
    // Waiting for a queue itself has no deadline.
    let events = client
        .markers()
        .ok_or(Refusal::Driver("a queue takes no marker".to_owned()))?;
    while !client.are_done(&events) {
        if Instant::now() >= deadline {
            return Err(Refusal::Busy);
        }
        std::thread::sleep(LOOK);
    }
    // A driver calls a little later than it says that a command is complete.
    let called = deadline.min(Instant::now() + CALLED);
    while client.completions.waits_for_events() {
        if Instant::now() >= called {
            return Err(Refusal::CannotBeMadeAgain("a callback of an event that is not set"));
        }
        std::thread::sleep(LOOK);
    }
    client.forget_retired();
    Ok(())
}

/// Asks for the binaries of all programs that can be run.
pub(crate) fn prepare(client: &Client) {
    let api = &client.backend.api;
    for object in client.all_objects() {
        if object.sort() == Sort::Program && runs(client, &object) {
            // Saving finds out what is wrong with it.
            drop(query::binaries(api, &object));
        }
    }
}

/// Whether a program can be run on each of its devices.
fn runs(client: &Client, program: &Held) -> bool {
    let api = &client.backend.api;
    let devices = query::words(api, program, query::PROGRAM_DEVICES).unwrap_or_default();
    let is_executable = |device: &u64| query::is_executable(api, program, query::address(*device));
    !devices.is_empty() && devices.iter().all(is_executable)
}

/// All of a client's objects, which nobody works with.
pub(super) fn objects(client: &Client, devices: &Devices, file: &mut Writing<'_>) -> Result<Objects, Refusal> {
    if let Some(reason) = client.unsaved() {
        return Err(Refusal::CannotBeMadeAgain(reason));
    }
    if !client.svm.is_empty() {
        return Err(Refusal::CannotBeMadeAgain(SVM));
    }
    let all = reachable(client);
    let mut steps: BTreeMap<(u64, u64), Step> = BTreeMap::new();
    let mut contents = Contents::new(client);
    let (mut maps, mut failures) = (Vec::new(), Vec::new());
    for object in &all {
        match (object.sort(), &object.state) {
            // What a client is told of is there always; commands' own events have no names.
            _ if object.name == 0 => continue,
            (Sort::Event, state) => {
                let step = event(client, object, state)?;
                steps.insert((object.order, u64::MAX), step);
            }
            (Sort::Program, _) => program(client, object, file, &mut steps)?,
            (_, State::Mem(memory)) => {
                let mut log = log(client, object)?;
                if memory.form == Form::Pipe {
                    return Err(Refusal::CannotBeMadeAgain("a pipe, whose packets nobody can read"));
                }
                if object.owner(Sort::Mem).is_none() {
                    let first = log.remove(0);
                    let made = decode(client, &first)?;
                    let bytes = contents.save(object, &made, file)?;
                    steps.insert((first.order, 0), Step::Memory(call(&first, file)?, bytes));
                }
                insert(log, file, &mut steps)?;
                let mapped = memory.maps.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if !mapped.is_empty() && has_its_name(client, object) {
                    maps.push((object.name, mapped));
                }
            }
            _ => insert(log(client, object)?, file, &mut steps)?,
        }
        let failure = object.untold_failure();
        if failure != 0 && has_its_name(client, object) {
            failures.push((object.sort() as usize, object.name, failure));
        }
    }
    let tables = client.saved_tables();
    let [platforms, told_devices] = tables.told;
    Ok(Objects {
        platforms: devices.places_of_platforms(&platforms)?,
        devices: devices.places_of(&told_devices)?,
        places: tables.places,
        steps: steps.into_values().collect(),
        maps,
        failures,
        due: client.completions.due().iter().map(due).collect(),
        cuda: crate::cuda::save(client, &mut |bytes| append(file, bytes))?,
    })
}

/// Whether the client can still name it: it may have released it, and given its name's place to another object.
fn has_its_name(client: &Client, object: &Held) -> bool {
    let found = client.find(object.sort(), object.name);
    found.is_ok_and(|found| Arc::ptr_eq(&found.0, &object.0))
}

/// All that has a name, and what that needs: each once.
fn reachable(client: &Client) -> Vec<Held> {
    let mut found: BTreeMap<usize, Held> = BTreeMap::new();
    let mut open = client.all_objects();
    while let Some(object) = open.pop() {
        let needs = object.needs().into_iter().map(Held);
        if found.insert(object.address(), object).is_none() {
            open.extend(needs);
        }
    }
    found.into_values().collect()
}

/// An object's calls, the first of which has made it.
fn log(client: &Client, object: &Held) -> Result<Vec<Logged>, Refusal> {
    let log = object.log.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let first = log.first().ok_or(Refusal::CannotBeMadeAgain(NOT_KEPT))?;
    let mut makes_it = false;
    decode(client, first)?.effects(&mut |effect, touched| {
        if let (Effect::Creates, Touched::Handle(handle)) = (effect, touched) {
            makes_it |= Sort::of(handle.c_type) == Some(object.sort()) && handle.raw == object.name;
        }
    });
    match makes_it {
        true => Ok(log),
        false => Err(Refusal::CannotBeMadeAgain(NOT_KEPT)),
    }
}

fn insert(log: Vec<Logged>, file: &mut Writing<'_>, steps: &mut BTreeMap<(u64, u64), Step>) -> Result<(), Refusal> {
    for logged in log {
        // Of an allocation that only a kernel has still.
        if logged.op == <SetKernelArgSVMPointer as ProtoCall<'_>>::OP {
            return Err(Refusal::CannotBeMadeAgain(SVM));
        }
        // The client has freed all that a kernel was told of, so that no kernel reaches it any more (OpenCL API, clSVMFree).
        if logged.op == <SetKernelExecInfo as ProtoCall<'_>>::OP {
            continue;
        }
        // It would not be found, or another one would be in its place.
        if !logged.has_its_objects() {
            return Err(Refusal::CannotBeMadeAgain(RELEASED));
        }
        // One that has made several objects is with all of them.
        if let Vacant(place) = steps.entry((logged.order, 0)) {
            place.insert(Step::Call(call(&logged, file)?));
        }
    }
    Ok(())
}

fn call(logged: &Logged, file: &mut Writing<'_>) -> io::Result<Call> {
    let reads = logged.bytes.iter();
    let reads = reads.map(|(span, bytes)| Ok((span.offset, file.append(bytes)?)));
    Ok(Call {
        op: logged.op,
        reads: reads.collect::<io::Result<_>>()?,
        arguments: file.append(&logged.arguments)?,
    })
}

fn decode<'l>(client: &Client, logged: &'l Logged) -> Result<AnyCall<'l>, Refusal> {
    let limits = Limits { arena: client.arena() };
    AnyCall::decode(logged.op, &logged.arguments, limits).map_err(|_| Refusal::CannotBeMadeAgain(NOT_KEPT))
}

fn event(client: &Client, object: &Held, state: &State) -> Result<Step, Refusal> {
    let api = &client.backend.api;
    let queue = object.owner(Sort::CommandQueue);
    let context = |object: &Object| object.owner(Sort::Context).map(|context| context.name);
    let context = queue.map_or_else(|| context(object), |queue| context(queue));
    let context = context.ok_or(Refusal::CannotBeMadeAgain("an event of no context"))?;
    let name = object.name;
    let queue = queue.map(|queue| queue.name);
    let status = || query::number(api, object, query::EVENT_STATUS).map(u32::cast_signed);
    Ok(match state {
        State::UserEvent => {
            let status = status().map_err(Refusal::code)?.min(SUBMITTED);
            Step::UserEvent { name, context, status }
        }
        State::Past(past) => Step::Event {
            name,
            context,
            queue,
            past: *past,
        },
        _ => {
            let status = status().map_err(Refusal::code)?;
            if status > 0 {
                return Err(Refusal::Busy);
            }
            let past = Past {
                command: query::number(api, object, query::EVENT_COMMAND_TYPE).map_err(Refusal::code)?,
                status,
                times: query::times(api, object),
            };
            Step::Event {
                name,
                context,
                queue,
                past,
            }
        }
    })
}

/// A program: with its binaries if it can be run on each of its devices.
fn program(
    client: &Client,
    object: &Held,
    file: &mut Writing<'_>,
    steps: &mut BTreeMap<(u64, u64), Step>,
) -> Result<(), Refusal> {
    let api = &client.backend.api;
    let log = log(client, object)?;
    let devices = query::words(api, object, query::PROGRAM_DEVICES).unwrap_or_default();
    let names: Option<Vec<u32>> = devices
        .iter()
        .map(|device| client.name_of(Sort::Device, *device))
        .collect();
    let context = object.owner(Sort::Context).map(|context| context.name);
    let binaries = runs(client, object)
        .then(|| query::binaries(api, object).ok())
        .flatten();
    let binaries = binaries.filter(|binaries| binaries.len() == devices.len() && !binaries.iter().any(Vec::is_empty));
    let (Some(devices), Some(context), Some(binaries)) = (names, context, binaries) else {
        return insert(log, file, steps);
    };
    // What came behind the last build is done to what that has made, and kernels may have been made in between.
    let built = log.iter().rposition(Logged::is_build).unwrap_or_default();
    let mut log = log;
    insert(log.split_off(built + 1), file, steps)?;
    let last = log.last().map_or(0, |logged| logged.order);
    let binaries = binaries.iter().map(|binary| file.append(binary));
    let step = Program {
        name: object.name,
        context,
        devices,
        binaries: binaries.collect::<io::Result<_>>()?,
        calls: log.iter().map(|logged| call(logged, file)).collect::<io::Result<_>>()?,
    };
    steps.insert((last, 1), Step::Program(step));
    Ok(())
}
