//! Endpoints of the tag `templates`: list, look at, change, remove. Those that the tenant has built are its own; those of the node, built by
//! its operator (`basalt template build`), are there for all tenants.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use control::BuildState;
use http::StatusCode;
use node_api::list::Place;
use node_api::{Request, Template as NodeTemplate};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::builds::status_word;
use super::extract::{Body, Name, Query};
use super::failures::{Failures, Forbidden};
use super::models::PageQuery;
use super::{page, snapshots};
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::origin::{Origin, split};
use crate::{time_text, uuid};

/// A template.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// Its newest build's.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Virtual CPUs.
    cpu_count: u32,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    /// MiB of the disk.
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    /// All tenants can use it.
    public: bool,
    /// What it is called.
    aliases: Vec<String>,
    /// The same.
    names: Vec<String>,
    /// When it was built.
    #[schema(format = DateTime)]
    created_at: String,
    /// The same.
    #[schema(format = DateTime)]
    updated_at: String,
    /// Nobody whom tenants know.
    #[schema(value_type = Option<Object>, required)]
    created_by: Option<()>,
    /// When a sandbox was last made of it.
    #[schema(format = DateTime, required)]
    last_spawned_at: Option<String>,
    /// Not counted.
    spawn_count: u64,
    /// How many of its builds are remembered.
    build_count: usize,
    /// The version of envd whose features its sandboxes have.
    envd_version: String,
    /// How far its newest build is: `waiting`, `building`, `ready` or `error`; of one of the node's `error` if no sandbox can be made of it now.
    build_status: &'static str,
}

/// A template with its build.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TemplateWithBuilds {
    /// The template.
    #[serde(flatten)]
    template: Template,
    /// Its builds, the newest first.
    builds: Vec<Build>,
}

/// How a template came to be.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Build {
    /// A UUID; of a template of the node's it follows from the template's id.
    #[serde(rename = "buildID")]
    build_id: String,
    /// `waiting`, `building`, `ready` or `error`.
    status: &'static str,
    /// When it was asked for.
    #[schema(format = DateTime)]
    created_at: String,
    /// When it was changed last.
    #[schema(format = DateTime)]
    updated_at: String,
    /// When it came to its end.
    #[schema(format = DateTime)]
    finished_at: Option<String>,
    /// Virtual CPUs.
    cpu_count: u32,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
}

/// What a name stands for.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AliasTarget {
    /// The template's id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// All tenants can use it.
    public: bool,
}

/// What may be changed of a template.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
#[schema(as = TemplateUpdateRequest)]
pub(crate) struct TemplateUpdate {
    /// Others can use it: not served.
    public: Option<bool>,
}

/// A template that was changed.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TemplateUpdateResponse)]
pub(crate) struct Updated {
    /// What it is called.
    names: Vec<String>,
}

impl Build {
    fn own(build: &control::Build) -> Self {
        Self {
            build_id: build.id.clone(),
            status: status_word(build.state),
            created_at: time_text::text(build.created_ns),
            updated_at: time_text::text(build.finished_ns.unwrap_or(build.created_ns)),
            finished_at: build.finished_ns.map(time_text::text),
            cpu_count: build.cpus.unwrap_or(0),
            memory_mb: build.memory_mib.unwrap_or(0),
        }
    }
}

/// A template of the tenant's own, with its builds.
async fn own(gateway: &Gateway, template: &control::Template) -> Result<TemplateWithBuilds, Error> {
    let id = template.id.clone();
    let builds = gateway.store.with(move |store| store.builds(&id)).await?;
    Ok(TemplateWithBuilds {
        template: own_shown(gateway, template, &builds),
        builds: builds.iter().map(Build::own).collect(),
    })
}

/// A template of the tenant's own, of which these are the builds, the newest first.
fn own_shown(gateway: &Gateway, template: &control::Template, builds: &[control::Build]) -> Template {
    let newest = builds.first();
    let changed = builds
        .iter()
        .map(|build| build.finished_ns.unwrap_or(build.created_ns))
        .max();
    let size = builds.iter().find(|build| build.state == BuildState::Ready).or(newest);
    Template {
        template_id: template.id.clone(),
        build_id: newest.map(|build| build.id.clone()).unwrap_or_default(),
        cpu_count: size.and_then(|build| build.cpus).unwrap_or(0),
        memory_mb: size.and_then(|build| build.memory_mib).unwrap_or(0),
        disk_size_mb: size.and_then(|build| build.disk_mib).unwrap_or(0),
        public: false,
        aliases: vec![template.name.clone()],
        names: vec![template.name.clone()],
        created_at: time_text::text(template.created_ns),
        updated_at: time_text::text(changed.unwrap_or(template.created_ns)),
        created_by: None,
        last_spawned_at: None,
        spawn_count: 0,
        build_count: builds.len(),
        envd_version: gateway.envd.version().to_owned(),
        build_status: newest.map_or("error", |build| status_word(build.state)),
    }
}

impl Template {
    fn of(gateway: &Gateway, template: &NodeTemplate, own: &BTreeMap<String, Vec<String>>) -> Self {
        let mut names = template.names.clone();
        names.extend(own.get(&template.id).cloned().unwrap_or_default());
        names.dedup();
        let created = time_text::text(template.created_ns);
        let resources = &template.resources;
        Self {
            template_id: template.id.clone(),
            build_id: uuid::dashed(&template.id),
            cpu_count: resources.cpus,
            memory_mb: resources.memory.bytes() >> 20,
            disk_size_mb: resources.disk.map_or(0, |disk| disk.bytes() >> 20),
            public: true,
            aliases: names.clone(),
            names,
            created_at: created.clone(),
            updated_at: created,
            created_by: None,
            last_spawned_at: (template.used_ns > template.created_ns).then(|| time_text::text(template.used_ns)),
            spawn_count: 0,
            build_count: 1,
            envd_version: gateway.envd.version().to_owned(),
            build_status: status(template),
        }
    }
}

fn status(template: &NodeTemplate) -> &'static str {
    match template.outdated {
        None => "ready",
        Some(_) => "error",
    }
}

/// Those that somebody has built; others the node makes for itself.
pub(super) async fn built(gateway: &Gateway, principal: &Principal) -> Result<Vec<NodeTemplate>, Error> {
    let mut all = gateway.nodes.templates(&principal.owner()).await?;
    all.retain(|template| template.recipe.is_some() && !template.sized);
    all.sort_by_key(|template| std::cmp::Reverse(place(template)));
    Ok(all)
}

fn place(template: &NodeTemplate) -> Place {
    Place {
        created_ns: template.created_ns,
        id: template.id.clone(),
    }
}

/// Where each is in a list, and how it is shown, the newest first: the tenant's own, and the node's.
async fn all(gateway: &Gateway, principal: &Principal) -> Result<Vec<(Place, Template)>, Error> {
    let names = snapshots::names(gateway, principal).await?;
    let of_node = built(gateway, principal).await?;
    let mut all: Vec<(Place, Template)> = of_node
        .iter()
        .map(|one| (place(one), Template::of(gateway, one, &names)))
        .collect();
    let tenant = Arc::clone(&principal.tenant);
    let (templates, builds) = gateway
        .store
        .with(move |store| Ok((store.templates(&tenant)?, store.all_builds(&tenant)?)))
        .await?;
    let mut by_template: BTreeMap<String, Vec<control::Build>> = BTreeMap::new();
    for build in builds {
        by_template.entry(build.template.clone()).or_default().push(build);
    }
    for one in templates {
        let builds = by_template.remove(&one.id).unwrap_or_default();
        let place = Place {
            created_ns: one.created_ns,
            id: one.id.clone(),
        };
        all.push((place, own_shown(gateway, &one, &builds)));
    }
    all.sort_by(|(one, _), (other, _)| other.cmp(one));
    Ok(all)
}

/// List templates, the newest first.
#[utoipa::path(get, path = "/templates", tag = "templates", responses((status = 200, body = [Template]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
) -> Result<Json<Vec<Template>>, Error> {
    let all = all(&gateway, &principal).await?;
    Ok(Json(all.into_iter().map(|(_, shown)| shown).collect()))
}

/// List templates by pages, the newest first.
#[utoipa::path(get, path = "/v2/templates", tag = "templates", params(PageQuery),
    responses((status = 200, body = [Template], headers(("x-next-token" = String, description = "Of the next page, if there is one"))), Failures))]
pub(crate) async fn list_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<PageQuery>,
) -> Result<Response, Error> {
    let limit = page::limit(query.limit)?;
    let after = page::parse(query.next_token.as_deref())?;
    let mut all = all(&gateway, &principal).await?;
    all.retain(|(place, _)| after.as_ref().is_none_or(|after| place < after));
    let is_cut = all.len() > limit;
    all.truncate(limit);
    let next = all.last().filter(|_| is_cut).map(|(place, _)| place.clone());
    let shown: Vec<Template> = all.into_iter().map(|(_, shown)| shown).collect();
    let mut response = Json(shown).into_response();
    if let Some(token) = next.as_ref().and_then(page::header) {
        response.headers_mut().insert(page::NEXT_TOKEN, token);
    }
    Ok(response)
}

/// Look at a template.
#[utoipa::path(get, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 200, body = TemplateWithBuilds), Failures))]
pub(crate) async fn get(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<TemplateWithBuilds>, Error> {
    if let Some(template) = gateway.own_template(&principal.tenant, &name).await? {
        return Ok(Json(own(&gateway, &template).await?));
    }
    let Origin::Template(found) = gateway.find(&principal, &name).await?.origin else {
        return Err(Error::NotFound { what: "template", name });
    };
    let own = snapshots::names(&gateway, &principal).await?;
    let template = Template::of(&gateway, &found, &own);
    let build = Build {
        build_id: template.build_id.clone(),
        status: template.build_status,
        created_at: template.created_at.clone(),
        updated_at: template.updated_at.clone(),
        finished_at: Some(template.created_at.clone()),
        cpu_count: template.cpu_count,
        memory_mb: template.memory_mb,
    };
    Ok(Json(TemplateWithBuilds {
        template,
        builds: vec![build],
    }))
}

/// What a name stands for.
#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = AliasTarget), Failures))]
pub(crate) async fn alias(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<AliasTarget>, Error> {
    // Also one that has no build yet.
    if let Some(template) = gateway.own_template(&principal.tenant, split(&name).0).await? {
        return Ok(Json(AliasTarget {
            template_id: template.id,
            public: false,
        }));
    }
    let found = gateway.find(&principal, &name).await?;
    Ok(Json(AliasTarget {
        template_id: found.origin.id().to_owned(),
        public: matches!(found.origin, Origin::Template(_)),
    }))
}

/// No tenant changes a template of the node's.
fn of_node(template: &NodeTemplate) -> Error {
    Error::Forbidden(format!(
        "template `{}` is there for all tenants of this node: its operator changes it, and removes it with `basalt template rm`",
        template.name()
    ))
}

/// Remove a template that the tenant has built, or a snapshot. Sandboxes that were made of it run on. What is being built of it is ended. The
/// node's templates are its operator's to remove.
#[utoipa::path(delete, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 204), Forbidden, Failures))]
pub(crate) async fn remove(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<StatusCode, Error> {
    if let Some(template) = gateway.own_template(&principal.tenant, &name).await? {
        gateway.remove_template(&template).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    let snapshot = match gateway.find(&principal, &name).await?.origin {
        Origin::Snapshot(snapshot) => snapshot.name,
        Origin::Built(_) => return Err(Error::NotFound { what: "template", name }),
        Origin::Template(template) => return Err(of_node(&template)),
    };
    let request = Request::RemoveSnapshot { name: snapshot.clone() };
    gateway.nodes.done(&principal.owner(), request).await?;
    let tenant = Arc::clone(&principal.tenant);
    gateway
        .store
        .with(move |store| store.forget_target(&tenant, &snapshot))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Change a template.
#[utoipa::path(patch, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    request_body = TemplateUpdate, responses((status = 200, body = Updated), Forbidden, Failures))]
pub(crate) async fn update(
    gateway: Shared<Arc<Gateway>>,
    principal: Principal,
    name: Name,
    asked: Body<TemplateUpdate>,
) -> Result<Json<Updated>, Error> {
    update_v2(gateway, principal, name, asked).await
}

/// Change a template.
#[utoipa::path(patch, path = "/v2/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    request_body = TemplateUpdate, responses((status = 200, body = Updated), Forbidden, Failures))]
pub(crate) async fn update_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
    Body(asked): Body<TemplateUpdate>,
) -> Result<Json<Updated>, Error> {
    let Some(template) = gateway.own_template(&principal.tenant, &name).await? else {
        return match gateway.find(&principal, &name).await?.origin {
            Origin::Template(template) => Err(of_node(&template)),
            _ => Err(Error::NotFound { what: "template", name }),
        };
    };
    match asked.public {
        Some(true) => Err(Error::invalid(
            "a tenant's templates are its own on this node: the operator builds those that all tenants can use, with `basalt template build`",
        )),
        _ => Ok(Json(Updated {
            names: vec![template.name],
        })),
    }
}
