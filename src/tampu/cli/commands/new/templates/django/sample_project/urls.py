"""The URLs."""

from django.urls import path

from sample_project import views

urlpatterns = [
    path("signups", views.sign_up),
    path("signups/<int:signup_id>", views.signup_status),
]
