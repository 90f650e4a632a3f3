//! Translates kernels to the languages of Metal and Direct3D, as `wgpu` does on Apple's systems and on Windows.
//!
//! `translate FOLDER` reads the `.wgsl` files of a folder. It prints each file that cannot be translated, with the
//! reason, and fails if there are any.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use wgpu::naga::Module;
use wgpu::naga::back::{hlsl, msl};
use wgpu::naga::front::wgsl;
use wgpu::naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<ExitCode, Failure> {
    let folder = env::args().nth(1).ok_or("usage: translate FOLDER")?;
    let mut failed = 0;
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|file| Ok(file?.path())).collect::<Result<_, Failure>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "wgsl"));
    files.sort();
    for file in &files {
        if let Err(failure) = translate(file) {
            failed += 1;
            println!("{}: {failure}", file.display());
        }
    }
    println!("{} kernels, {failed} cannot be translated", files.len());
    Ok(if failed == 0 && !files.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn translate(file: &Path) -> Result<(), Failure> {
    let source = fs::read_to_string(file)?;
    let module = wgsl::parse_str(&source).map_err(|e| e.emit_to_string(&source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module);
    let info = info.map_err(|e| e.emit_to_string(&source))?;
    to_msl(&module, &info).map_err(|e| format!("Metal: {e}"))?;
    to_hlsl(&module, &info).map_err(|e| format!("Direct3D: {e}"))?;
    Ok(())
}

/// Metal 2.4 has 64-bit integers and is on every device that `wgpu` supports.
fn to_msl(module: &Module, info: &ModuleInfo) -> Result<(), msl::Error> {
    let options = msl::Options { lang_version: (2, 4), ..Default::default() };
    msl::write_string(module, info, &options, &msl::PipelineOptions::default()).map(|_| ())
}

fn to_hlsl(module: &Module, info: &ModuleInfo) -> Result<(), hlsl::Error> {
    let immediates_target = Some(hlsl::BindTarget::default());
    let shader_model = hlsl::ShaderModel::V6_2;
    let options = hlsl::Options { shader_model, immediates_target, ..Default::default() };
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
        .write(module, info, None)
        .map(|_| ())
}
