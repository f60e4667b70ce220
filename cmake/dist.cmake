# libapa_dist: keys on several ranks, over MPI. Nobody without MPI pays for it.
#
#   APA_MPI=AUTO   built with the command where there is an MPI (the default)
#   APA_MPI=ON     an error where there is none
#   APA_MPI=OFF    left out
# Programs: apa-mpi, the commands run and bench under mpirun (docs/distributed.md).
find_package(Threads REQUIRED)

# libapa_dist_nccl: keys on several GPUs, over NCCL; needs the CUDA engine. APA_NCCL=ON, and APA_NCCL_ROOT where NCCL is not
# in the usual places (PyTorch's wheels have it in site-packages/nvidia/nccl).
option(APA_NCCL "libapa_dist_nccl over NCCL (needs APA_CUDA)" OFF)
set(APA_NCCL_ROOT "" CACHE PATH "Folder with include/nccl.h and lib/libnccl.so.2")
if(APA_NCCL)
  find_path(APA_NCCL_INCLUDE nccl.h HINTS ${APA_NCCL_ROOT}/include)
  find_library(APA_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${APA_NCCL_ROOT}/lib)
  if(NOT apa_cuda_on OR NOT APA_NCCL_INCLUDE OR NOT APA_NCCL_LIBRARY)
    message(FATAL_ERROR "APA_NCCL=ON: needs APA_CUDA=ON, nccl.h and libnccl (APA_NCCL_ROOT)")
  endif()
  message(STATUS "libapa_dist_nccl: ${APA_NCCL_LIBRARY}")
  set(apa_nccl_object ${CMAKE_BINARY_DIR}/cuda/merge.o)
  add_custom_command(OUTPUT ${apa_nccl_object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${APA_NVCC} ${apa_cuda_flags} ${apa_cuda_archs_cuda} -c ${PROJECT_SOURCE_DIR}/src/dist/nccl/merge.cu -o ${apa_nccl_object}
    DEPENDS src/dist/nccl/merge.cu src/dist/nccl/merge.h include/apa/tensor.h COMMENT "nvcc merge.cu" VERBATIM)
  set_source_files_properties(${apa_nccl_object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  add_library(apa_dist_nccl STATIC src/dist/nccl/nccl.c ${apa_nccl_object})
  target_include_directories(apa_dist_nccl PUBLIC include PRIVATE src)
  target_include_directories(apa_dist_nccl SYSTEM PUBLIC ${APA_CUDA_INCLUDE} ${APA_NCCL_INCLUDE})
  target_link_libraries(apa_dist_nccl PUBLIC apa_static ${APA_NCCL_LIBRARY})
  install(TARGETS apa_dist_nccl ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(APA_TESTS)
    add_executable(apa_nccl_verify tests/dist/nccl_verify.c) # needs devices: run by hand
    set_target_properties(apa_nccl_verify PROPERTIES OUTPUT_NAME nccl_verify)
    target_link_libraries(apa_nccl_verify PRIVATE apa_dist_nccl Threads::Threads m)
  endif()
endif()

set(APA_MPI AUTO CACHE STRING "libapa_dist over MPI: AUTO, ON, OFF")
set_property(CACHE APA_MPI PROPERTY STRINGS AUTO ON OFF)

set(apa_mpi_on OFF)
if(APA_MPI STREQUAL "ON" OR (APA_MPI STREQUAL "AUTO" AND APA_COMMAND AND NOT CMAKE_CROSSCOMPILING))
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND)
    set(apa_mpi_on ON)
  elseif(APA_MPI STREQUAL "ON")
    message(FATAL_ERROR "APA_MPI=ON: no MPI found (Debian: libopenmpi-dev, openmpi-bin)")
  endif()
endif()
if(NOT apa_mpi_on)
  message(STATUS "libapa_dist, apa-mpi: left out (APA_MPI=${APA_MPI}, no MPI)")
  return()
endif()
message(STATUS "libapa_dist, apa-mpi: MPI ${MPI_C_VERSION}, ${MPIEXEC_EXECUTABLE}")

file(GLOB apa_dist_sources CONFIGURE_DEPENDS src/dist/*.c)
add_library(apa_dist_objects OBJECT ${apa_dist_sources})
target_include_directories(apa_dist_objects PUBLIC include PRIVATE src)
target_link_libraries(apa_dist_objects PUBLIC MPI::MPI_C Threads::Threads)
add_library(apa_dist_static STATIC $<TARGET_OBJECTS:apa_dist_objects>)
add_library(apa_dist_shared SHARED $<TARGET_OBJECTS:apa_dist_objects>)
foreach(kind static shared)
  set_target_properties(apa_dist_${kind} PROPERTIES OUTPUT_NAME apa_dist)
  target_include_directories(apa_dist_${kind} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_link_libraries(apa_dist_${kind} PUBLIC apa_${kind} MPI::MPI_C Threads::Threads m)
endforeach()
set_target_properties(apa_dist_shared PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

# apa-mpi: options, inputs and reports are the command's own files.
if(APA_COMMAND)
  file(GLOB apa_mpi_sources CONFIGURE_DEPENDS cli/dist/*.c)
  file(GLOB apa_mpi_shared CONFIGURE_DEPENDS cli/common.c cli/inputs.c cli/machine.c cli/options.c cli/place.c cli/report.c
       cli/scores.c cli/synthetic.c)
  add_executable(apa_mpi_command ${apa_mpi_sources} ${apa_mpi_shared})
  set_target_properties(apa_mpi_command PROPERTIES OUTPUT_NAME apa-mpi)
  target_include_directories(apa_mpi_command PRIVATE cli)
  target_link_libraries(apa_mpi_command PRIVATE apa_dist_static PkgConfig::JANSSON)
  install(TARGETS apa_mpi_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
set_target_properties(apa_dist_shared PROPERTIES EXPORT_NAME dist INSTALL_RPATH "$ORIGIN") # libapa lies beside it
set_target_properties(apa_dist_static PROPERTIES EXPORT_NAME dist_static)
install(TARGETS apa_dist_static apa_dist_shared EXPORT apa-dist-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
